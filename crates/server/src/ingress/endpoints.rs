//! What an endpoint look-up answers: an address without a scheme, and the headers that open it.
//!
//! Pure, in two steps, because some mistakes are reported before it is known whether the sandbox exists.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use sandglass_sandbox::ports::runtime::Exposure;

use super::lookup::{Reach, Target};
use super::minting::{Minted, Minting};
use super::refusal::Refusal;
use super::route::Mount;
use super::{AGENT_PORT, EGRESS_PORT, HTTP_PORT};
use crate::config::EndpointStyle;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointQuery {
    pub port: i64,
    pub use_server_proxy: bool,
    /// Ask for a signed route that is open until this Unix second.
    pub expires: Option<i128>,
}

/// From where it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vantage<'a> {
    /// The request's own `Host`.
    pub host: &'a str,
    pub mount: Mount,
    /// `server.eip`: how the server is reached from elsewhere.
    pub eip: Option<&'a str>,
    /// The name of this machine for those who come without the server.
    pub public_host: &'a str,
    pub style: EndpointStyle,
    pub open_proxy: bool,
    /// When there is one, clients come through it unless they ask for the server.
    pub gateway: Option<&'a Minting>,
    /// Unix seconds.
    pub now: u64,
}

/// Where to send requests, and with what.
#[derive(Clone, PartialEq, Eq)]
pub struct EndpointAnswer {
    /// `host[:port][/path]`.
    pub endpoint: String,
    /// Headers that every request there must carry.
    pub headers: Vec<(&'static str, String)>,
}

/// Tokens stay out of logs.
impl fmt::Debug for EndpointAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.headers.iter().map(|(name, _)| name).collect();
        f.debug_struct("EndpointAnswer").field("endpoint", &self.endpoint).field("headers", &names).finish()
    }
}

/// What holds whatever the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    port: u16,
    expires: Option<u64>,
}

/// What is wrong with the query whatever the sandbox. The order is the documented one.
pub fn check(query: EndpointQuery, gateway: Option<&Minting>, now: u64) -> Result<Checked, Refusal> {
    match (query.expires, query.use_server_proxy) {
        (Some(_), true) => return Err(Refusal::ExpiresWithProxy),
        (Some(_), false) if gateway.is_none() => return Err(Refusal::ExpiresUnsupported),
        _ => {}
    }
    let port = u16::try_from(query.port).ok().filter(|port| *port != 0).ok_or(Refusal::PortOutOfRange)?;
    let future = |second: i128| u64::try_from(second).ok().filter(|second| *second > now);
    let expires = query.expires.map(|second| future(second).ok_or(Refusal::ExpiresInvalid)).transpose()?;
    if expires.is_some() && !gateway.is_some_and(Minting::signs) {
        return Err(Refusal::ExpiresUnsigned);
    }
    Ok(Checked { port, expires })
}

/// The answer for a sandbox that exists.
pub fn answer(
    query: EndpointQuery,
    vantage: Vantage<'_>,
    id: &str,
    target: &Target,
) -> Result<EndpointAnswer, Refusal> {
    let Checked { port, expires } = check(query, vantage.gateway, vantage.now)?;
    if target.reach == Reach::Gone {
        return Err(Refusal::NotRunning);
    }
    // Only the server looks at a secure sandbox's token, so no way round it is told.
    let guarded = target.secure_access && target.exposure != Exposure::Address;
    let way = match vantage.gateway {
        Some(gateway) if !query.use_server_proxy => Way::Gateway(gateway.mint((id, port), expires)?),
        None if !query.use_server_proxy && vantage.style == EndpointStyle::Direct && !guarded => {
            direct(vantage.public_host, target, port)?
        }
        _ => Way::Server(format!("{}/sandboxes/{id}/proxy/{port}", vantage.base())),
    };
    let mut headers = headers(&way, vantage, target, (port, expires));
    let endpoint = match way {
        Way::Gateway(minted) => {
            headers.extend(minted.header.map(|value| ("OpenSandbox-Ingress-To", value)));
            minted.endpoint
        }
        Way::Server(endpoint) | Way::Port(endpoint) | Way::Agent(endpoint) => endpoint,
    };
    // The signature stands for the token, which must not get around with it.
    if target.secure_access && expires.is_none() && !target.route_token.is_empty() {
        headers.push(("OpenSandbox-Secure-Access", target.route_token.clone()));
    }
    Ok(EndpointAnswer { endpoint, headers })
}

/// Which program takes the request first.
enum Way {
    /// This server.
    Server(String),
    /// Whatever listens on the port.
    Port(String),
    /// The sandbox's agent, which relays.
    Agent(String),
    /// The gateway, which keeps nothing from the program that listens.
    Gateway(Minted),
}

/// The way that does not lead through this server.
fn direct(public_host: &str, target: &Target, port: u16) -> Result<Way, Refusal> {
    let starting = matches!(target.reach, Reach::Starting(_));
    let unmapped = if starting { Refusal::AddressUnknown } else { Refusal::Unmapped };
    let published = |mapped: u16| match mapped {
        0 => Err(unmapped),
        mapped => Ok(format!("{public_host}:{mapped}")),
    };
    match target.exposure {
        Exposure::Address => {
            let address = address(target.reach).ok_or(unmapped)?;
            Ok(Way::Port(SocketAddr::new(address, port).to_string()))
        }
        Exposure::Host => Ok(Way::Port(format!("{public_host}:{port}"))),
        Exposure::Published { http, .. } if port == HTTP_PORT => Ok(Way::Port(published(http)?)),
        Exposure::Published { egress: Some(egress), .. } if port == EGRESS_PORT => {
            Ok(Way::Port(published(egress)?))
        }
        Exposure::Published { agent, .. } => Ok(Way::Agent(format!("{}/proxy/{port}", published(agent)?))),
        Exposure::None => Err(unmapped),
    }
}

/// A token that the sandbox does not have is not asked for.
fn headers(
    way: &Way,
    vantage: Vantage<'_>,
    target: &Target,
    (port, expires): (u16, Option<u64>),
) -> Vec<(&'static str, String)> {
    let mut headers = Vec::new();
    let mut put = |name: &'static str, token: &str| {
        if !token.is_empty() {
            headers.push((name, token.to_owned()));
        }
    };
    match way {
        Way::Agent(_) => put("X-EXECD-ACCESS-TOKEN", &target.agent_token),
        Way::Server(_) | Way::Port(_) | Way::Gateway(_)
            if port == AGENT_PORT && !target.agent_token.is_empty() =>
        {
            put("X-EXECD-ACCESS-TOKEN", &target.agent_token);
        }
        Way::Server(_) if !vantage.open_proxy => put("X-Sandglass-Access", &target.route_token),
        // A secure one has the same token under its own name, and a signature stands for it.
        Way::Gateway(_) if !target.open && !target.secure_access && expires.is_none() => {
            put("X-Sandglass-Access", &target.route_token);
        }
        Way::Server(_) | Way::Port(_) | Way::Gateway(_) => {}
    }
    if port == EGRESS_PORT {
        put("OPENSANDBOX-EGRESS-AUTH", target.egress_token.as_deref().unwrap_or_default());
    }
    headers
}

fn address(reach: Reach) -> Option<IpAddr> {
    match reach {
        Reach::Addressable(address) | Reach::Paused(address) => Some(address),
        Reach::Starting(address) => address,
        Reach::Nowhere | Reach::Gone => None,
    }
}

impl Vantage<'_> {
    /// Under what the API's paths are reached: `host[:port][/path]`.
    #[must_use]
    pub fn base(&self) -> String {
        match self.eip.map(without_scheme) {
            Some(eip) => eip.to_owned(),
            None => format!("{}{}", self.host, self.mount.prefix()),
        }
    }
}

/// `server.eip` without scheme, surrounding space and trailing slashes.
pub(super) fn without_scheme(eip: &str) -> &str {
    let eip = eip.trim();
    eip.split_once("://").map_or(eip, |(_, rest)| rest).trim_end_matches('/')
}

#[cfg(test)]
mod tests {
    use sandglass_ingress::{Expiry, Generation, Key, Route};

    use super::*;
    use crate::config::RouteMode;

    const HOST: Vantage<'_> = Vantage {
        host: "api.local:8080",
        mount: Mount::V1,
        eip: None,
        public_host: "192.0.2.9",
        style: EndpointStyle::Proxied,
        open_proxy: false,
        gateway: None,
        now: 1_000,
    };
    const DIRECT: Vantage<'_> = Vantage { style: EndpointStyle::Direct, ..HOST };
    const EIP: Vantage<'_> = Vantage { eip: Some(" https://gw.example/base/ "), ..HOST };
    const AGENT: (&str, &str) = ("X-EXECD-ACCESS-TOKEN", "agent");
    const ROUTE: (&str, &str) = ("X-Sandglass-Access", "route");
    const SECURE: (&str, &str) = ("OpenSandbox-Secure-Access", "route");

    fn target(secure_access: bool) -> Target {
        Target { secure_access, ..Target::at(Reach::Addressable(IpAddr::from([10, 1, 0, 2]))) }
    }

    fn query(port: i64, use_server_proxy: bool) -> EndpointQuery {
        EndpointQuery { port, use_server_proxy, expires: None }
    }

    #[test]
    fn the_table_of_answers() {
        type Case =
            (Vantage<'static>, i64, bool, bool, &'static str, &'static [(&'static str, &'static str)]);
        let bare = Vantage { mount: Mount::Bare, ..HOST };
        let open = Vantage { open_proxy: true, ..HOST };
        let plain_eip = Vantage { eip: Some("203.0.113.7:9000"), style: EndpointStyle::Direct, ..HOST };
        let cases: &[Case] = &[
            (HOST, 44772, false, false, "api.local:8080/v1/sandboxes/x/proxy/44772", &[AGENT]),
            (HOST, 44772, true, false, "api.local:8080/v1/sandboxes/x/proxy/44772", &[AGENT]),
            (HOST, 8080, false, false, "api.local:8080/v1/sandboxes/x/proxy/8080", &[ROUTE]),
            (HOST, 8080, false, true, "api.local:8080/v1/sandboxes/x/proxy/8080", &[ROUTE, SECURE]),
            (HOST, 44772, false, true, "api.local:8080/v1/sandboxes/x/proxy/44772", &[AGENT, SECURE]),
            (bare, 8080, false, false, "api.local:8080/sandboxes/x/proxy/8080", &[ROUTE]),
            (open, 8080, false, false, "api.local:8080/v1/sandboxes/x/proxy/8080", &[]),
            (open, 8080, false, true, "api.local:8080/v1/sandboxes/x/proxy/8080", &[SECURE]),
            (open, 44772, false, false, "api.local:8080/v1/sandboxes/x/proxy/44772", &[AGENT]),
            (DIRECT, 8080, false, false, "10.1.0.2:8080", &[]),
            (DIRECT, 44772, false, false, "10.1.0.2:44772", &[AGENT]),
            (DIRECT, 44772, false, true, "10.1.0.2:44772", &[AGENT, SECURE]),
            (DIRECT, 8080, true, false, "api.local:8080/v1/sandboxes/x/proxy/8080", &[ROUTE]),
            (EIP, 8080, false, false, "gw.example/base/sandboxes/x/proxy/8080", &[ROUTE]),
            (plain_eip, 8080, true, false, "203.0.113.7:9000/sandboxes/x/proxy/8080", &[ROUTE]),
            (plain_eip, 8080, false, false, "10.1.0.2:8080", &[]),
        ];
        for (vantage, port, use_server_proxy, secure, endpoint, headers) in cases {
            let answer = answer(query(*port, *use_server_proxy), *vantage, "x", &target(*secure)).unwrap();
            assert_eq!(answer.endpoint, *endpoint);
            let given: Vec<_> = answer.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            assert_eq!(given, *headers, "{endpoint}");
        }
    }

    #[test]
    fn what_cannot_be_answered() {
        let expiring = |port, use_server_proxy| EndpointQuery { port, use_server_proxy, expires: Some(1) };
        // The order matters: without a gateway the port is looked at last, and what `expires` says never.
        assert_eq!(check(expiring(0, true), None, 0), Err(Refusal::ExpiresWithProxy));
        assert_eq!(check(expiring(0, false), None, 0), Err(Refusal::ExpiresUnsupported));
        for port in [0, -1, 65536, i64::MAX] {
            assert_eq!(check(query(port, false), None, 0), Err(Refusal::PortOutOfRange));
        }
        assert_eq!(check(query(65535, false), None, 0), Ok(Checked { port: 65535, expires: None }));

        let (signing, silent) = (minting("gw", RouteMode::Uri, true), minting("gw", RouteMode::Uri, false));
        let check = |gateway: &Minting, port, expires| {
            let asked = EndpointQuery { port, use_server_proxy: false, expires: Some(expires) };
            check(asked, Some(gateway), 1_000)
        };
        assert_eq!(check(&signing, 80, 1_001), Ok(Checked { port: 80, expires: Some(1_001) }));
        assert_eq!(check(&signing, 80, u64::MAX.into()).map(|c| c.expires), Ok(Some(u64::MAX)));
        assert_eq!(check(&signing, 0, -1), Err(Refusal::PortOutOfRange));
        for second in [i128::MIN, -1, 0, 999, 1_000, i128::from(u64::MAX) + 1, i128::MAX] {
            assert_eq!(check(&signing, 80, second), Err(Refusal::ExpiresInvalid), "{second}");
            assert_eq!(check(&silent, 80, second), Err(Refusal::ExpiresInvalid), "{second}");
        }
        assert_eq!(check(&silent, 80, 1_001), Err(Refusal::ExpiresUnsigned));

        let with = |reach| Target { reach, ..target(false) };
        let address = IpAddr::from([10, 1, 0, 2]);
        for (reach, direct) in [
            (Reach::Starting(None), Err(Refusal::AddressUnknown)),
            (Reach::Starting(Some(address)), Ok("10.1.0.2:80")),
            (Reach::Paused(address), Ok("10.1.0.2:80")),
            (Reach::Gone, Err(Refusal::NotRunning)),
        ] {
            let got = answer(query(80, false), DIRECT, "x", &with(reach)).map(|answer| answer.endpoint);
            assert_eq!(got, direct.map(str::to_owned), "{reach:?}");
        }
        assert!(answer(query(80, false), HOST, "x", &with(Reach::Starting(None))).is_ok());
    }

    #[test]
    fn the_table_of_answers_where_ports_are_published() {
        const EGRESS: (&str, &str) = ("OPENSANDBOX-EGRESS-AUTH", "egress");
        let bridge = Exposure::Published { agent: 40_001, http: 40_002, egress: None };
        let filtered = Exposure::Published { agent: 40_001, http: 40_002, egress: Some(40_003) };
        let broken = Exposure::Published { agent: 0, http: 0, egress: None };
        let on = |exposure, egress_token: Option<&str>| Target {
            exposure,
            egress_token: egress_token.map(str::to_owned),
            ..target(false)
        };
        let foreign = |exposure| Target {
            agent_token: String::new(),
            route_token: String::new(),
            ..on(exposure, None)
        };
        let secure = |exposure| Target { secure_access: true, ..on(exposure, None) };
        let proxied = "api.local:8080/v1/sandboxes/x/proxy";
        type Case = (Target, i64, bool, Result<String, Refusal>, &'static [(&'static str, &'static str)]);
        let cases: &[Case] = &[
            (on(bridge, None), 8080, false, Ok("192.0.2.9:40002".into()), &[]),
            (on(bridge, None), 44772, false, Ok("192.0.2.9:40001/proxy/44772".into()), &[AGENT]),
            (on(bridge, None), 3000, false, Ok("192.0.2.9:40001/proxy/3000".into()), &[AGENT]),
            (on(bridge, None), 18080, false, Ok("192.0.2.9:40001/proxy/18080".into()), &[AGENT]),
            (on(filtered, Some("egress")), 18080, false, Ok("192.0.2.9:40003".into()), &[EGRESS]),
            (on(filtered, Some("egress")), 3000, false, Ok("192.0.2.9:40001/proxy/3000".into()), &[AGENT]),
            (on(filtered, Some("egress")), 18080, true, Ok(format!("{proxied}/18080")), &[ROUTE, EGRESS]),
            (
                on(bridge, Some("egress")),
                18080,
                false,
                Ok("192.0.2.9:40001/proxy/18080".into()),
                &[AGENT, EGRESS],
            ),
            (on(bridge, None), 8080, true, Ok(format!("{proxied}/8080")), &[ROUTE]),
            (foreign(bridge), 44772, false, Ok("192.0.2.9:40001/proxy/44772".into()), &[]),
            (foreign(bridge), 8080, true, Ok(format!("{proxied}/8080")), &[]),
            (on(Exposure::Host, None), 3000, false, Ok("192.0.2.9:3000".into()), &[]),
            (on(Exposure::Host, None), 44772, false, Ok("192.0.2.9:44772".into()), &[AGENT]),
            (secure(bridge), 8080, false, Ok(format!("{proxied}/8080")), &[ROUTE, SECURE]),
            (secure(Exposure::Host), 44772, false, Ok(format!("{proxied}/44772")), &[AGENT, SECURE]),
            (on(broken, None), 8080, false, Err(Refusal::Unmapped), &[]),
            (on(broken, None), 3000, false, Err(Refusal::Unmapped), &[]),
            (on(Exposure::None, None), 3000, false, Err(Refusal::Unmapped), &[]),
            (on(Exposure::None, None), 3000, true, Ok(format!("{proxied}/3000")), &[ROUTE]),
        ];
        for (target, port, use_server_proxy, endpoint, headers) in cases {
            let seen = answer(query(*port, *use_server_proxy), DIRECT, "x", target);
            let given = seen.as_ref().map(|a| a.headers.clone()).unwrap_or_default();
            let given: Vec<_> = given.iter().map(|(name, value)| (*name, value.as_str())).collect();
            assert_eq!(seen.map(|answer| answer.endpoint), *endpoint, "{port} of {target:?}");
            assert_eq!(given, *headers, "{port} of {target:?}");
        }
        let starting = Target { reach: Reach::Starting(None), ..on(Exposure::None, None) };
        assert_eq!(answer(query(3000, false), DIRECT, "x", &starting), Err(Refusal::AddressUnknown));
    }

    const UUID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

    fn minting(address: &str, route: RouteMode, signs: bool) -> Minting {
        let secret = b"secret-bytes-0001".to_vec();
        Minting::new(address, route, signs.then_some((Key { id: 'k', secret }, Generation::Short)))
    }

    #[test]
    fn the_table_of_answers_through_a_gateway() {
        const EGRESS: (&str, &str) = ("OPENSANDBOX-EGRESS-AUTH", "egress");
        let to = |value: &str| ("OpenSandbox-Ingress-To", value.to_owned());
        let owned = |(name, value): (&'static str, &str)| (name, value.to_owned());
        let (wildcard, uri, header) = (
            minting("*.example.com", RouteMode::Wildcard, true),
            minting("gw.example.com/base", RouteMode::Uri, true),
            minting("gw.example.com:8443", RouteMode::Header, true),
        );
        let label = |port: u16| format!("{UUID}-{port}");
        let signature = |port| {
            let key = Key { id: 'k', secret: b"secret-bytes-0001".to_vec() };
            let route = Route::signed(&key, Generation::Short, (UUID, port), Expiry::at(2_000_000_000));
            route.label().rsplit('-').next().unwrap().to_owned()
        };
        let soon = Some(2_000_000_000);
        type Case<'a> = (&'a Minting, u16, bool, Option<i128>, String, Vec<(&'static str, String)>);
        let cases: Vec<Case<'_>> = vec![
            (&wildcard, 8080, false, None, format!("{}.example.com", label(8080)), vec![owned(ROUTE)]),
            (&wildcard, 44772, false, None, format!("{}.example.com", label(44772)), vec![owned(AGENT)]),
            (&uri, 8080, true, None, format!("gw.example.com/base/{UUID}/8080"), vec![owned(SECURE)]),
            (&header, 8080, false, None, "gw.example.com:8443".into(), vec![owned(ROUTE), to(&label(8080))]),
            (
                &uri,
                80,
                false,
                soon,
                format!("gw.example.com/base/{UUID}/80/x2qxvk/{}", signature(80)),
                vec![],
            ),
            (
                &header,
                18080,
                true,
                None,
                "gw.example.com:8443".into(),
                vec![owned(EGRESS), to(&label(18080)), owned(SECURE)],
            ),
            (
                &wildcard,
                8080,
                true,
                soon,
                format!("{}-x2qxvk-{}.example.com", label(8080), signature(8080)),
                vec![],
            ),
            (&uri, 80, true, soon, format!("gw.example.com/base/{UUID}/80/x2qxvk/{}", signature(80)), vec![]),
            (
                &header,
                18080,
                true,
                soon,
                "gw.example.com:8443".into(),
                vec![owned(EGRESS), to(&format!("{}-x2qxvk-{}", label(18080), signature(18080)))],
            ),
        ];
        for (gateway, port, secure_access, expires, endpoint, headers) in cases {
            for exposure in [Exposure::Address, Exposure::Published { agent: 1, http: 2, egress: Some(3) }] {
                let egress_token = Some("egress".to_owned());
                let target = Target { exposure, egress_token, ..target(secure_access) };
                let vantage = Vantage { gateway: Some(gateway), ..HOST };
                let asked = EndpointQuery { port: port.into(), use_server_proxy: false, expires };
                let answer = answer(asked, vantage, UUID, &target).unwrap();
                assert_eq!((answer.endpoint.as_str(), &answer.headers), (endpoint.as_str(), &headers));
            }
        }
        let through = |target: &Target, port| {
            let vantage = Vantage { gateway: Some(&uri), ..HOST };
            answer(query(port, false), vantage, UUID, target).unwrap().headers
        };
        let open = Target { open: true, ..target(false) };
        assert_eq!((through(&open, 8080), through(&open, 44772)), (vec![], vec![owned(AGENT)]));
        assert_eq!(through(&Target { open: true, ..target(true) }, 8080), [owned(SECURE)]);
        // An agent that asks for nothing is behind the gateway's own question.
        let tokenless = Target { agent_token: String::new(), ..target(false) };
        assert_eq!(through(&tokenless, 44772), [owned(ROUTE)]);

        let vantage = Vantage { gateway: Some(&header), ..EIP };
        let proxied = answer(query(8080, true), vantage, "x", &target(false)).unwrap();
        assert_eq!(proxied.endpoint, "gw.example/base/sandboxes/x/proxy/8080");
        assert_eq!(proxied.headers, [owned(ROUTE)]);
    }
}
