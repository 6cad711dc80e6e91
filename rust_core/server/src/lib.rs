//! Embedding servers, and the middleware in front of them.
