//! See [`persia_server`].

fn main() {}
