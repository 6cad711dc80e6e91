//! [`Kind`]: the kind of this process.

use persia_wire::discovery::Service;

/// An embedding server, or a middleware.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Its name in discovery.
    pub service: Service,
    /// Its gRPC service.
    pub grpc: &'static str,
    /// Its default port.
    pub port: u16,
}
