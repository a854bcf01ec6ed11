use proptest::prelude::*;

use super::*;
use crate::keys::Keys;

const UUID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

fn key() -> Key {
    Key { id: 'k', secret: b"secret-bytes-0001".to_vec() }
}

/// Id, port, and expiry when it is signed.
fn seen(route: &Route) -> (&str, u16, Option<&str>) {
    let expires = match &route.proof {
        Proof::Signed(signed) => Some(signed.expires().as_str()),
        Proof::None | Proof::Scoped(_) => None,
    };
    (&route.id, route.port, expires)
}

#[test]
fn labels() {
    let long = "a".repeat(64);
    let full = format!("x-80-1-{long}k");
    type Case<'a> = (&'a str, Option<(&'a str, u16, Option<&'a str>)>);
    let cases: &[Case<'_>] = &[
        ("box-8080", Some(("box", 8080, None))),
        ("box-8080.example.com:28888", Some(("box", 8080, None))),
        ("http://box-8080.example.com", Some(("box", 8080, None))),
        ("https://box-8080.example.com", Some(("box", 8080, None))),
        ("http://https://box-8080", Some(("box", 8080, None))),
        ("https://http://box-8080", Some(("http://box", 8080, None))),
        // A port in a host without a dot belongs to the label.
        ("box-8080:28888", None),
        ("0f8fad5b-d9cb-469f-a165-70867728950e-8080", Some((UUID, 8080, None))),
        ("0f8fad5b-d9cb-469f-a165-70867728950e-8080-vbbc00-ad9e3286k", Some((UUID, 8080, Some("vbbc00")))),
        ("sbx-1234-8080-vbbc00-ad9e3286k.x.y", Some(("sbx-1234", 8080, Some("vbbc00")))),
        (&full, Some(("x", 80, Some("1")))),
        // Looks signed, but the port is last.
        ("x-80-1-abcdef120-8080", Some(("x-80-1-abcdef120", 8080, None))),
        ("x-80-1-abcdef12k", Some(("x", 80, Some("1")))),
        // Three parts are never signed.
        ("80-1-abcdef12k", None),
        ("a-b-80", Some(("a-b", 80, None))),
        ("a--80", Some(("a-", 80, None))),
        ("a-080", Some(("a", 80, None))),
        ("a-b-00080", Some(("a-b", 80, None))),
        // Not a signature, so the last part would have to be a port.
        ("x-080-1-abcdef12k", None),
        ("x-80-01-abcdef12k", None),
        ("x-80-1-ABCDEF12k", None),
        ("-80", None),
        ("-a-80", None),
        ("-80-1-abcdef12k", None),
        ("a-0", None),
        ("a-+80", None),
        ("a-65536", None),
        ("a-99999999999999999999", None),
        ("a-", None),
        ("a-x", None),
        ("a", None),
        ("", None),
        (".box-80", None),
        ("localhost", None),
        ("10.0.0.1", None),
        ("[::1]:80", None),
    ];
    for (text, expected) in cases {
        let got = Route::from_header(text);
        assert_eq!(got.as_ref().ok().map(seen), *expected, "{text}");
        assert_eq!(Route::from_host(text), got, "{text}");
    }
}

#[test]
fn paths() {
    type Case<'a> = (&'a str, Option<(&'a str, u16, Option<&'a str>)>, &'a str, &'a str);
    let cases: &[Case<'_>] = &[
        ("/box/8080", Some(("box", 8080, None)), "/", "/"),
        ("box/8080", Some(("box", 8080, None)), "/", "/"),
        ("/box/8080/", Some(("box", 8080, None)), "/", "/"),
        ("/box/8080//x//", Some(("box", 8080, None)), "//x//", "//x//"),
        ("/box/8080/a%2Fb/%E4%BD%A0", Some(("box", 8080, None)), "/a%2Fb/%E4%BD%A0", "/a%2Fb/%E4%BD%A0"),
        ("/box/8080/1/abcdef12k", Some(("box", 8080, Some("1"))), "/", "/1/abcdef12k"),
        ("/box/8080/1/abcdef12k/", Some(("box", 8080, Some("1"))), "/", "/1/abcdef12k/"),
        ("/box/8080/1/abcdef12k/x%2F/y", Some(("box", 8080, Some("1"))), "/x%2F/y", "/1/abcdef12k/x%2F/y"),
        ("/box/8080/01/abcdef12k", Some(("box", 8080, None)), "/01/abcdef12k", "/01/abcdef12k"),
        ("/box/8080/1/abcdef12K", Some(("box", 8080, None)), "/1/abcdef12K", "/1/abcdef12K"),
        ("/box/8080/../../x", Some(("box", 8080, None)), "/../../x", "/../../x"),
        ("/status.ok", None, "", ""),
        ("/", None, "", ""),
        ("", None, "", ""),
        ("/box", None, "", ""),
        ("/box/", None, "", ""),
        ("//8080/x", None, "", ""),
        ("/box/08080/x", None, "", ""),
        ("/box/http/x", None, "", ""),
        ("/box/0/x", None, "", ""),
        ("/box/65536", None, "", ""),
        ("/box/+80", None, "", ""),
        ("//8080/1/abcdef12k", None, "", ""),
    ];
    for (path, expected, rest, unsigned) in cases {
        let got = PathRoute::parse(path);
        assert_eq!(got.as_ref().ok().map(|got| seen(&got.route)), *expected, "{path}");
        let Ok(got) = got else { continue };
        assert_eq!(got.rest, *rest, "{path}");
        let plain = got.unsigned();
        assert_eq!((plain.rest, plain.route.proof), (*unsigned, Proof::None), "{path}");
    }
}

#[test]
fn tokens_are_routes_in_headers_and_paths_but_not_in_hosts() {
    let token = "f1.ZGVmYXVsdA.ZnNiLTE.8080.a.4MbOJekc5dADw0ju4KamWA";
    let route = Route::from_header(token).unwrap();
    assert_eq!((route.id.as_str(), route.port, route.label().as_str()), ("fsb-1", 8080, token));
    assert_eq!(Route::from_header("f1.x-80"), Err(RouteError::Scope(ScopeError::Malformed)));
    assert_eq!(Route::from_host(token), Err(RouteError::Malformed));

    let path = format!("/{token}/1/abcdef12k//x");
    let in_path = PathRoute::parse(&path).unwrap();
    assert_eq!((&in_path.route, in_path.rest), (&route, "/1/abcdef12k//x"));
    assert_eq!(PathRoute::parse(&format!("/{token}")).unwrap().unsigned().rest, "/");
    assert_eq!(PathRoute::parse("/f1.x/80/y"), Err(RouteError::Scope(ScopeError::Malformed)));
}

#[test]
fn host_names_hold_whole_signatures() {
    let expires = Expiry::at(2_000_000_000);
    let label = Route::packed(&key(), (UUID, 44772), expires.clone()).unwrap();
    assert!(label.len() <= LABEL_LIMIT && !label.contains('-'), "{label}");
    let route = Route::from_host(&format!("{label}.example.com")).unwrap();
    assert_eq!(seen(&route), (UUID, 44772, Some("x2qxvk")));
    let Proof::Signed(signed) = &route.proof else { panic!() };
    let keys = Keys::new([key()]);
    assert_eq!(signed.verify(&keys, (UUID, 44772), 2_000_000_000), Ok(()));
    assert!(signed.verify(&keys, (UUID, 44772), 2_000_000_001).is_err());
    assert!(signed.verify(&keys, (UUID, 44773), 0).is_err());
    assert!(!signed.is_guessable());
    // Any digit that changes changes what is signed, or the signature.
    for index in 0..label.len() {
        let mut other = label.clone().into_bytes();
        other[index] = if other[index] == b'1' { b'2' } else { b'1' };
        let other = String::from_utf8(other).unwrap();
        let opens = Route::from_host(&other).is_ok_and(|route| match &route.proof {
            Proof::Signed(signed) => signed.verify(&keys, (&route.id, route.port), 0).is_ok(),
            Proof::None | Proof::Scoped(_) => false,
        });
        assert!(!opens, "{other}");
    }
    assert_eq!(Route::packed(&key(), ("my-sandbox", 80), expires.clone()), Err(LabelError::TooLong));
    assert_eq!(Route::packed(&key(), (&UUID.to_uppercase(), 80), expires), Err(LabelError::TooLong));
    assert_eq!(Route::packed(&key(), (UUID, 80), Expiry::at(u64::MAX)), Err(LabelError::TooLate));

    let signed = |generation| Route::signed(&key(), generation, (UUID, 44772), Expiry::at(2_000_000_000));
    assert_eq!(signed(Generation::Short).host_label().map(|label| label.len()), Ok(59));
    assert_eq!(signed(Generation::Full).host_label(), Err(LabelError::TooLong));
}

fn id() -> impl Strategy<Value = String> {
    "[a-z0-9][a-z0-9-]{0,30}[a-z0-9]"
}

fn generation() -> impl Strategy<Value = Generation> {
    prop_oneof![Just(Generation::Full), Just(Generation::Short)]
}

proptest! {
    #[test]
    fn nothing_panics(text in ".{0,90}") {
        let _ = Route::from_header(&text);
        let _ = Route::from_host(&text);
        let _ = PathRoute::parse(&text).map(PathRoute::unsigned);
    }

    #[test]
    fn near_misses_do_not_panic_either(text in "(f1\\.|/)?([a-z0-9é]{0,26}[-/.]){0,6}[a-z0-9]{0,66}") {
        let _ = Route::from_header(&text);
        let _ = PathRoute::parse(&text).map(PathRoute::unsigned);
    }

    #[test]
    fn what_is_written_is_read(id in id(), port in 1..=u16::MAX, at in any::<u64>(), generation in generation()) {
        let signed = Route::signed(&key(), generation, (&id, port), Expiry::at(at));
        prop_assert_eq!(&Route::from_header(&signed.label()).unwrap(), &signed);
        let path = format!("/{}/x", signed.path());
        let read = PathRoute::parse(&path).unwrap();
        prop_assert_eq!((&read.route, read.rest), (&signed, "/x"));
        let Proof::Signed(proof) = &signed.proof else { unreachable!() };
        prop_assert!(proof.verify(&Keys::new([key()]), (&id, port), at).is_ok());
    }

    #[test]
    fn plain_routes_are_read_unless_their_id_looks_signed(id in id(), port in 1..=u16::MAX) {
        let plain = Route::plain(id, port);
        prop_assert_eq!(&Route::from_header(&plain.label()).unwrap(), &plain);
    }

    #[test]
    fn packed_routes_are_read(number in any::<u128>(), port in 1..=u16::MAX, at in 0..36_u64.pow(7)) {
        let id = uuid_text(number);
        let label = Route::packed(&key(), (&id, port), Expiry::at(at)).unwrap();
        let route = Route::from_host(&label).unwrap();
        prop_assert_eq!((route.id.as_str(), route.port), (id.as_str(), port));
        let Proof::Signed(proof) = &route.proof else { panic!("not signed") };
        prop_assert!(proof.verify(&Keys::new([key()]), (&id, port), at).is_ok());
    }

    #[test]
    fn what_follows_a_path_route_is_untouched(id in id(), port in 1..=u16::MAX, rest in "(/[!-~&&[^/]]{0,12}){0,5}") {
        let path = format!("/{id}/{port}{rest}");
        let plain = PathRoute::parse(&path).unwrap().unsigned();
        prop_assert_eq!(plain.rest, if rest.is_empty() { "/" } else { &rest });
        prop_assert_eq!((plain.route.id, plain.route.port), (id, port));
    }
}
