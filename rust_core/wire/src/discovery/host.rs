//! The address at which other hosts reach this one.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};

use super::error::{DiscoveryError, without_password};

const NATS_PORT: u16 = 4222;

/// The host that this process announces: `advertise` (`PERSIA_ADVERTISE`) if given, otherwise the IPv4
/// address of the interface `ifname` (`PERSIA_SOCKET_IFNAME`) if given, otherwise the local address of a
/// connection to NATS. If one of the first two is a loopback address although NATS is on another host, a
/// warning is logged. Blocks while the host name of NATS is resolved.
///
/// # Errors
/// `NoInterface`, `InterfacesUnknown`; `NoAddress` if neither is given and the host name of NATS cannot be resolved or
/// has no route.
pub fn advertised_host(
    nats_url: &str,
    advertise: Option<&str>,
    ifname: Option<&str>,
) -> Result<String, DiscoveryError> {
    let (variable, value, address) = match (advertise, ifname) {
        (Some(host), _) => ("PERSIA_ADVERTISE", host, host.to_owned()),
        (None, Some(name)) => ("PERSIA_SOCKET_IFNAME", name, of_interface(name)?),
        (None, None) => return route_to(nats_url).map(|route| route.local.to_string()),
    };
    if is_loopback(&address) && is_on_another_host(nats_url) {
        tracing::warn!(
            "{variable}={value}: this process announces {address}, a loopback address, although NATS is on another \
             host: no other host can reach this process"
        );
    }
    Ok(address)
}

fn is_loopback(address: &str) -> bool {
    address == "localhost" || address.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Whether NATS has an address, and the address is not one of this host.
fn is_on_another_host(nats_url: &str) -> bool {
    !nats_url.is_empty() && route_to(nats_url).is_ok_and(|route| route.leaves_this_host())
}

/// The local and the remote address of a connection.
struct Route {
    local: IpAddr,
    remote: IpAddr,
}

impl Route {
    /// Whether the connection leaves this host. If it does not, both addresses are equal, or both are loopback
    /// addresses.
    fn leaves_this_host(&self) -> bool {
        self.local != self.remote && !self.remote.is_loopback()
    }
}

fn of_interface(name: &str) -> Result<String, DiscoveryError> {
    let interfaces = if_addrs::get_if_addrs().map_err(|error| DiscoveryError::InterfacesUnknown {
        name: name.to_owned(),
        what: error.to_string(),
    })?;
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

fn route_to(nats_url: &str) -> Result<Route, DiscoveryError> {
    let no_address = |what: String| DiscoveryError::NoAddress { url: without_password(nats_url), what };
    let rest = nats_url.split_once("://").map_or(nats_url, |(_, rest)| rest);
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    // Nothing is sent: connecting a datagram socket only chooses a route.
    let route = || -> std::io::Result<Route> {
        let addresses = match host.to_socket_addrs() {
            Ok(addresses) => addresses,
            Err(_) => (host, NATS_PORT).to_socket_addrs()?,
        };
        let mut last = std::io::Error::other("the name has no IPv4 address");
        for address in addresses.filter(|address| address.is_ipv4()) {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            match socket.connect(address).and_then(|()| socket.local_addr()) {
                Ok(local) => return Ok(Route { local: local.ip(), remote: address.ip() }),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    route().map_err(|error| no_address(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_or_the_way_to_nats_gives_the_address() {
        let towards = |nats: &str| advertised_host(nats, None, None);
        assert_eq!(towards("nats://user:pass@127.0.0.1:4222").unwrap(), "127.0.0.1");
        assert_eq!(towards("127.0.0.1").unwrap(), "127.0.0.1");
        let nowhere = "nats://nowhere.invalid:4222";
        assert_eq!(advertised_host(nowhere, None, Some("lo")).unwrap(), "127.0.0.1");
        assert_eq!(advertised_host(nowhere, Some("far"), Some("lo")).unwrap(), "far");
        let error = advertised_host("nats://127.0.0.1:4222", None, Some("eth99")).unwrap_err().to_string();
        assert!(error.contains("eth99") && error.contains("lo (127.0.0.1)"), "{error}");
        let error = towards(nowhere).unwrap_err().to_string();
        assert!(error.contains("nowhere.invalid") && error.contains("PERSIA_ADVERTISE"), "{error}");
    }

    #[test]
    fn nats_at_an_address_of_this_host_is_not_on_another_host() {
        let own = if_addrs::get_if_addrs().unwrap();
        for address in own.iter().map(if_addrs::Interface::ip).filter(IpAddr::is_ipv4) {
            assert!(!is_on_another_host(&format!("nats://{address}:4222")), "{address}");
        }
        assert!(!is_on_another_host("nats://127.0.0.9:4222") && !is_on_another_host(""));
        let route = |local: [u8; 4], remote: [u8; 4]| Route { local: local.into(), remote: remote.into() };
        assert!(!route([10, 0, 0, 1], [10, 0, 0, 1]).leaves_this_host());
        assert!(route([10, 0, 0, 1], [10, 0, 0, 2]).leaves_this_host());
    }

    #[test]
    fn loopback_addresses_are_told_from_others() {
        for (address, expected) in
            [("127.0.0.1", true), ("::1", true), ("localhost", true), ("10.0.0.1", false), ("far", false)]
        {
            assert_eq!(is_loopback(address), expected, "{address}");
        }
    }
}
