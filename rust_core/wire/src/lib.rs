//! The protocol between trainers, middlewares and embedding servers.
