//! Paused sandboxes that requests resume.

use super::*;

/// Waits, for as long as it takes, until something holds.
async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn many_requests_resume_a_sandbox_once() {
    let stage = Stage::new(40, RouteFrom::HeaderOrHost).await;
    let route = format!("asleep-{}", stage.port);
    let asking: Vec<_> = (0..8).map(|_| stage.to(&route, "")).collect();
    let all = futures_util::future::join_all(asking);
    let (answers, ()) = tokio::join!(all, async {
        until(|| stage.known.wakes.load(Relaxed) == 1).await;
        stage.known.may_wake.add_permits(1);
    });
    assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
    assert_eq!(stage.known.wakes.load(Relaxed), 1);
    assert_eq!(stage.to(&route, "").await.status, 200);
    assert_eq!(stage.known.wakes.load(Relaxed), 1, "it runs now");
}

#[tokio::test]
async fn who_does_not_pass_wakes_nobody() {
    let stage = Stage::new(41, RouteFrom::HeaderOrHost).await;
    stage.known.change("asleep", |target| target.secure_access = true);
    assert_eq!(stage.to(&format!("asleep-{}", stage.port), "").await.status, 401);
    assert_eq!(stage.to(&format!("paused-{}", stage.port), "").await.status, 503);
    // A probe is no reason to wake anybody.
    let probe = stage.to(&format!("asleep-{}", stage.port), "OpenSandbox-Access-Renew: skip\r\n").await;
    assert_eq!(probe.status, 401);
    stage.known.change("asleep", |target| (target.secure_access, target.open) = (false, false));
    assert_eq!(stage.to(&format!("asleep-{}", stage.port), "").await.status, 401);
    stage.known.change("asleep", |target| target.open = true);
    let probe = stage.to(&format!("asleep-{}", stage.port), "OpenSandbox-Access-Renew: skip\r\n").await;
    assert_eq!(probe.status, 503);
    assert_eq!(stage.known.wakes.load(Relaxed), 0);
}

#[tokio::test]
async fn waiting_is_bounded_in_time_and_number() {
    let brief = Park { patience: Duration::from_secs(1), most: 64 };
    let stage =
        Stage::with(42, RouteFrom::HeaderOrHost, |s| GatewaySettings { park: Some(brief), ..s }).await;
    let route = format!("asleep-{}", stage.port);
    let seen = stage.to(&route, "").await;
    assert_eq!((seen.status, seen.head.contains("retry-after: 1")), (503, true), "{seen:?}");
    stage.known.may_wake.add_permits(1);
    assert_eq!(stage.to(&route, "").await.status, 200);

    let nobody = Park { patience: Duration::from_secs(60), most: 0 };
    let stage =
        Stage::with(43, RouteFrom::HeaderOrHost, |s| GatewaySettings { park: Some(nobody), ..s }).await;
    assert_eq!(stage.to(&route, "").await.status, 503);
    assert_eq!(stage.known.wakes.load(Relaxed), 0);

    let stage = Stage::with(44, RouteFrom::HeaderOrHost, |s| GatewaySettings { park: None, ..s }).await;
    assert_eq!(stage.to(&route, "").await.status, 503);
    assert_eq!(stage.known.wakes.load(Relaxed), 0);
}

#[tokio::test]
async fn a_resume_that_fails_is_told_and_tried_again() {
    let stage = Stage::new(45, RouteFrom::HeaderOrHost).await;
    stage.known.may_wake.close();
    let route = format!("asleep-{}", stage.port);
    for attempt in 1..=2 {
        assert_eq!(stage.to(&route, "").await.status, 503);
        assert_eq!(stage.known.wakes.load(Relaxed), attempt);
    }
}
