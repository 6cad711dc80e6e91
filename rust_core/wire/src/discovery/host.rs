//! The address at which other hosts reach this one.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};

use super::error::{DiscoveryError, without_password};

const NATS_PORT: u16 = 4222;

/// The IPv4 address of the interface `ifname` (`PERSIA_SOCKET_IFNAME`), else the local address of a connection to NATS.
/// Blocks while the name of NATS is resolved.
///
/// # Errors
/// `NoInterface`; `NoAddress` when the name of NATS is unknown or has no route.
pub fn advertised_host(nats_url: &str, ifname: Option<&str>) -> Result<String, DiscoveryError> {
    let Some(name) = ifname else { return towards(nats_url) };
    let address = of_interface(name)?;
    if !nats_url.is_empty()
        && is_loopback(&address)
        && towards(nats_url).is_ok_and(|other| !is_loopback(&other))
    {
        tracing::warn!(
            "PERSIA_SOCKET_IFNAME={name}: this process announces {address}, a loopback address, although NATS is on another \
             host: no other host reaches it"
        );
    }
    Ok(address)
}

fn is_loopback(address: &str) -> bool {
    address.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn of_interface(name: &str) -> Result<String, DiscoveryError> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let ipv4: Vec<(String, IpAddr)> = interfaces
        .into_iter()
        .map(|interface| (interface.name.clone(), interface.ip()))
        .filter(|(_, address)| address.is_ipv4())
        .collect();
    match ipv4.iter().find(|(interface, _)| interface == name) {
        Some((_, address)) => Ok(address.to_string()),
        None => Err(DiscoveryError::NoInterface {
            name: name.to_owned(),
            there: ipv4.iter().map(|(interface, address)| format!("{interface} ({address})")).collect(),
        }),
    }
}

fn towards(nats_url: &str) -> Result<String, DiscoveryError> {
    let no_address = |what: String| DiscoveryError::NoAddress { url: without_password(nats_url), what };
    let rest = nats_url.split_once("://").map_or(nats_url, |(_, rest)| rest);
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    // Nothing is sent: connecting a datagram socket only chooses a route.
    let route = || -> std::io::Result<IpAddr> {
        let addresses = match host.to_socket_addrs() {
            Ok(addresses) => addresses,
            Err(_) => (host, NATS_PORT).to_socket_addrs()?,
        };
        let mut last = std::io::Error::other("the name has no IPv4 address");
        for address in addresses.filter(|address| address.is_ipv4()) {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            match socket.connect(address).and_then(|()| socket.local_addr()) {
                Ok(local) => return Ok(local.ip()),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    route().map(|address| address.to_string()).map_err(|error| no_address(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_or_the_way_to_nats_gives_the_address() {
        assert_eq!(advertised_host("nats://user:pass@127.0.0.1:4222", None).unwrap(), "127.0.0.1");
        assert_eq!(advertised_host("127.0.0.1", None).unwrap(), "127.0.0.1");
        assert_eq!(advertised_host("nats://nowhere.invalid", Some("lo")).unwrap(), "127.0.0.1");
        let error = advertised_host("nats://127.0.0.1:4222", Some("eth99")).unwrap_err().to_string();
        assert!(error.contains("eth99") && error.contains("lo (127.0.0.1)"), "{error}");
        let error = advertised_host("nats://nowhere.invalid:4222", None).unwrap_err().to_string();
        assert!(error.contains("nowhere.invalid") && error.contains("PERSIA_ADVERTISE"), "{error}");
    }
}
