//! From create to nothing left.

use crate::stage::{stage, traces};

#[test]
fn a_box_starts_answers_and_leaves_nothing() {
    let stage = stage();
    let boxed = stage.boxed();
    println!("{:#?}", boxed.timings);
    let (out, code) = boxed.run("id; hostname; pwd; ls -la / /etc /dev; cat /etc/resolv.conf /etc/hosts; mount; ip addr; ip route; ps; cat /proc/1/status; ls /sys/fs/cgroup/memory | head -3");
    println!("{out}");
    assert_eq!(code, 0);
    let answer = boxed.remove();
    assert!(answer.ok, "{answer:?}");
    assert_eq!(traces(&boxed.spec, &boxed.dir), Vec::<String>::new());
    assert!(!boxed.dir.exists());
}
