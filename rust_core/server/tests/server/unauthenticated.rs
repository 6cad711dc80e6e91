//! Tests that unauthenticated connections do not block other callers for long.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use persia_types::Tables;
use persia_types::limits::MAX_CONNECTIONS;
use persia_wire::auth::Secret;
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::settings::Endpoint;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

use crate::running::{PATIENCE, Setting};

const SECRET: &str = "0123456789abcdef0123456789abcdef";
/// The HTTP/2 preface, followed by empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Connect from a separate address, and send only what an HTTP/2 client must send.
async fn connect_from(source: u8, port: u16) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, source], 0).into()).unwrap();
    let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
    stream.write_all(PREFACE).await.unwrap();
    stream
}

#[test]
fn connections_that_do_not_authenticate_give_way_to_one_that_does() {
    let setting = Setting::new();
    let path = setting.path("token");
    fs::write(&path, SECRET).unwrap();
    let server = setting.server(0, 1, &["--token-file", &path]);
    let address = server.endpoint().to_string();
    let middleware = setting.middleware(&["--token-file", &path, "--servers", &address]);
    let Endpoint::Tcp { port, .. } = middleware.endpoint() else { panic!("a TCP port") };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _held: Vec<TcpStream> = runtime.block_on(async {
        let mut held = Vec::new();
        for number in 0..MAX_CONNECTIONS {
            held.push(connect_from(2 + (number % 4) as u8, port).await);
        }
        held
    });
    let options = ClientOptions {
        secret: Some(Secret::read(Path::new(&path)).unwrap()),
        ..ClientOptions::new(Targets::Fixed(vec![middleware.endpoint()]))
    };
    let client = WireTables::connect(options).unwrap();
    let since = Instant::now();
    client.wait_ready(PATIENCE).unwrap();
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    assert_eq!(client.stats().unwrap().generation, 0);
}
