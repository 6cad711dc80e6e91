//! [`Kind`]: the kind of this process.

use persia_wire::discovery::Service;

/// An embedding server, or a middleware.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// The service name in discovery.
    pub service: Service,
    /// The name of the gRPC service.
    pub grpc: &'static str,
    /// The default port.
    pub port: u16,
}
