//! What is looked at before any box is made.

use crate::stage::stage;

#[test]
fn the_doctor_finds_this_machine_fit() {
    let stage = stage();
    let checks = sandglass_shim::doctor::probe(&stage.home.join("not/yet/there"));
    for check in &checks {
        println!("{check:?}");
        assert!(check.ok || !check.required, "{check:?}");
        assert!(check.ok == check.remedy.is_empty());
    }
    assert!(checks.len() >= 15);
    for name in ["egress policies", "connection limits"] {
        assert!(checks.iter().any(|check| check.name == name && check.ok), "{name}");
    }
}
