//! The egress enforcer in the shim's loop: what it says becomes events, and when it ends it is started again.

use crate::egress::{Told, mark};
use crate::launch::Enforced;

use super::Shim;

impl Shim {
    /// Takes over an enforcer that enforces.
    pub(super) fn enforced(&mut self, egress: Option<Enforced>) {
        let Some(Enforced { enforcer, told }) = egress else { return };
        self.enforcer = Some(enforcer);
        self.state.enforcer = mark(&self.remains);
        self.write_state();
        self.tell(told);
    }

    pub(super) fn enforcer_said(&mut self) {
        if let Some(enforcer) = &mut self.enforcer {
            enforcer.log.pump();
            let told = enforcer.hear();
            self.tell(told);
        }
    }

    /// The enforcer's pidfd became readable. The kernel's rules go on without it.
    pub(super) fn enforcer_ended(&mut self) {
        let Some(status) =
            self.remains.egress_program.as_ref().and_then(|program| program.reap().ok().flatten())
        else {
            return;
        };
        self.enforcer_said();
        self.remains.egress_program = None;
        self.state.enforcer = None;
        self.write_state();
        if let Some(enforcer) = &mut self.enforcer {
            let told = enforcer.ended(&status);
            self.tell(vec![told]);
        }
    }

    /// The pause after its end is over.
    pub(super) fn restart_enforcer(&mut self) {
        let Some(enforcer) = &mut self.enforcer else { return };
        match enforcer.start(&self.dir, &self.spec, &mut self.remains) {
            Ok(()) => {
                self.state.enforcer = mark(&self.remains);
                self.write_state();
            }
            Err(error) => self.complain("the egress enforcer was not started again", &error),
        }
    }

    fn tell(&mut self, told: Vec<Told>) {
        for one in told {
            if let Told::Event(event) = one {
                self.event(event.kind, &event.message, event.data);
            }
        }
    }
}
