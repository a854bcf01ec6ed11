//! Who passes.

use super::*;

#[tokio::test]
async fn the_table_of_access() {
    let stage = Stage::new(20, RouteFrom::HeaderOrHost).await;
    let port = stage.port;
    let (short, full) = (signed(Generation::Short, UUID, port), signed(Generation::Full, UUID, port));
    let other_port = Route { port: port ^ 1, ..short.clone() };
    let expired = Route::signed(&key(), Generation::Short, (UUID, port), Expiry::at(1));
    let stranger = Key { id: 'z', ..key() };
    let unknown = Route::signed(&stranger, Generation::Short, (UUID, port), Expiry::at(u64::MAX));
    let plain = format!("{UUID}-{port}");
    let packed = Route::packed(&key(), (UUID, port), Expiry::at(Moment::now().wall + 1000)).unwrap();
    const TOKEN: &str = "OpenSandbox-Secure-Access: secret\r\n";
    for (route, headers, status) in [
        (plain.clone(), "", 401),
        (plain.clone(), TOKEN, 200),
        (plain.clone(), "OpenSandbox-Secure-Access:  secret \r\n", 200),
        (plain.clone(), "OpenSandbox-Secure-Access: secrez\r\n", 401),
        (short.label(), "", 200),
        (full.label(), "", 200),
        (packed, "", 200),
        // A header that is there decides, even an empty one.
        (full.label(), "OpenSandbox-Secure-Access: secrez\r\n", 401),
        (full.label(), "OpenSandbox-Secure-Access:\r\n", 401),
        (expired.label(), TOKEN, 200),
        (expired.label(), "", 401),
        (unknown.label(), "", 401),
        (other_port.label(), "", 401),
        (format!("tokenless-{port}"), "", 401),
        (format!("tokenless-{port}"), "OpenSandbox-Secure-Access:\r\n", 401),
        // Whoever asks for nothing ignores everything.
        (format!("box-{port}"), "OpenSandbox-Secure-Access: x\r\n", 200),
        (signed(Generation::Short, "box", port).label(), "", 200),
    ] {
        let seen = stage.to(&route, headers).await;
        assert_eq!(seen.status, status, "{route} {headers}: {seen:?}");
        assert_eq!(seen.is_ours(), status != 200);
    }
    assert_eq!(stage.known.used.lock().unwrap().len(), 8, "who does not pass does not count");
}

#[tokio::test]
async fn a_sandbox_is_closed_unless_it_is_said_to_be_open() {
    let stage = Stage::new(23, RouteFrom::HeaderOrHost).await;
    let id = "box-with-dashes";
    stage.known.change(id, |target| target.open = false);
    let port = stage.port;
    let plain = format!("{id}-{port}");
    let short = signed(Generation::Short, id, port);
    let elsewhere = Route { port, ..signed(Generation::Short, id, port ^ 1) };
    for (route, headers, status) in [
        (plain.as_str(), "", 401),
        (&plain, "X-Sandglass-Access: secret\r\n", 200),
        (&plain, "OpenSandbox-Secure-Access: secret\r\n", 200),
        (&plain, "X-Sandglass-Access: secrez\r\n", 401),
        (&plain, "X-Sandglass-Access:\r\n", 401),
        // The agent's token is for the agent's port.
        (&plain, "X-EXECD-ACCESS-TOKEN: agent-token\r\n", 401),
        (&plain, "Authorization: Bearer secret\r\nCookie: x-sandglass-access=secret\r\n", 401),
        (&short.label(), "", 200),
        (&elsewhere.label(), "", 401),
        (&short.label(), "X-Sandglass-Access: secrez\r\n", 401),
    ] {
        let seen = stage.to(route, headers).await;
        assert_eq!((seen.status, seen.is_ours()), (status, status != 200), "{route} {headers}: {seen:?}");
        assert_eq!(seen.got("x-sandglass-access"), None);
    }
    // The agent listens where the program does.
    let published = crate::ingress::Mapped { agent: port, http: port, egress: None };
    stage.known.change(id, |target| target.mapped = Some(published));
    let agent = format!("{id}-44772");
    for (headers, status) in [
        ("", 401),
        ("X-EXECD-ACCESS-TOKEN: agent-token\r\n", 200),
        ("X-EXECD-ACCESS-TOKEN: agent-tokem\r\n", 401),
        ("X-Sandglass-Access: secret\r\n", 200),
    ] {
        assert_eq!(stage.to(&agent, headers).await.status, status, "{headers}");
    }
    stage
        .known
        .change(id, |target| (target.route_token, target.agent_token) = (String::new(), String::new()));
    for headers in ["", "X-Sandglass-Access:\r\n", "X-EXECD-ACCESS-TOKEN:\r\n"] {
        assert_eq!(stage.to(&agent, headers).await.status, 401, "what nobody has opens nothing: {headers}");
    }
}

#[tokio::test]
async fn what_looks_signed_in_a_path_is_the_applications_for_whoever_shows_the_token() {
    let stage = Stage::new(24, RouteFrom::Path).await;
    stage.known.change("box", |target| target.open = false);
    let path = format!("GET /box/{}/1/abcdef12k/x", stage.port);
    assert_eq!(stage.ask(&path, "Host: h\r\n").await.status, 401, "signed, and expired");
    let seen = stage.ask(&path, "Host: h\r\nX-Sandglass-Access: secret\r\n").await;
    assert_eq!((seen.status, seen.body.lines().next()), (200, Some("GET /1/abcdef12k/x")));
    let route = signed(Generation::Short, "box", stage.port);
    let seen = stage.ask(&format!("GET /{}/x", route.path()), "Host: h\r\n").await;
    assert_eq!((seen.status, seen.body.lines().next()), (200, Some("GET /x")));
}

#[tokio::test]
async fn without_keys_signed_routes_cannot_be_checked() {
    let keyless =
        |settings| GatewaySettings { door: Access::new(Keys::default(), Generation::Full), ..settings };
    let stage = Stage::with(21, RouteFrom::HeaderOrHost, keyless).await;
    let seen = stage.to(&signed(Generation::Full, UUID, stage.port).label(), "").await;
    assert_eq!((seen.status, seen.is_ours()), (503, true));
    let with_token = "OpenSandbox-Secure-Access: secret\r\n";
    assert_eq!(stage.to(&format!("{UUID}-{}", stage.port), with_token).await.status, 200);
}

#[tokio::test]
async fn guessing_short_signatures_ends_soon() {
    let stage = Stage::new(22, RouteFrom::HeaderOrHost).await;
    let wrong = Route { port: stage.port, ..signed(Generation::Short, UUID, stage.port ^ 1) };
    let mut statuses = Vec::new();
    for _ in 0..70 {
        statuses.push(stage.to(&wrong.label(), "").await.status);
    }
    assert_eq!((statuses[0], statuses.last()), (401, Some(&429)));
    assert_eq!(stage.to(&signed(Generation::Full, UUID, stage.port).label(), "").await.status, 200);
    let other = Route { id: "guarded".to_owned(), ..wrong };
    assert_eq!(stage.to(&other.label(), "").await.status, 401, "another sandbox is another matter");
}
