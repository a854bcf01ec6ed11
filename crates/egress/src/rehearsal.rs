//! A plane on a kernel that only remembers, for tests of what stands around it.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::audit::{Audit, Event};
use crate::enforcer::Enforcer;
use crate::firewall::{Connection, Plan};
use crate::plane::{Dependent, Parts, Plane};
use crate::policy::Rules;
use crate::settings::Settings;
use crate::state::State;

/// What a kernel was asked, and what of it does not work.
#[derive(Default)]
pub(crate) struct Recorded {
    pub(crate) plans: Vec<Plan>,
    pub(crate) admitted: Vec<(IpAddr, Duration)>,
    /// Connections that exist; those that were cut are not among them any more.
    pub(crate) connections: Vec<Connection>,
    pub(crate) broken: Option<&'static str>,
}

#[derive(Clone, Default)]
pub(crate) struct Kernel(Arc<Mutex<Recorded>>);

impl Kernel {
    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, Recorded> {
        self.0.lock().unwrap()
    }

    fn works(&self, step: &str) -> io::Result<()> {
        match self.lock().broken {
            Some(broken) if broken == step => Err(io::Error::other(format!("no {step}"))),
            _ => Ok(()),
        }
    }
}

impl Enforcer for Kernel {
    fn apply(&mut self, plan: &Plan) -> io::Result<()> {
        self.works("apply")?;
        self.lock().plans.push(plan.clone());
        Ok(())
    }

    fn admit(&mut self, addresses: &[(IpAddr, Duration)]) -> io::Result<()> {
        self.works("admit")?;
        self.lock().admitted.extend(addresses);
        Ok(())
    }

    fn cut(&mut self, may_stay: &dyn Fn(&Connection) -> bool) -> io::Result<usize> {
        self.works("cut")?;
        let mut recorded = self.lock();
        let before = recorded.connections.len();
        recorded.connections.retain(|connection| may_stay(connection));
        Ok(before - recorded.connections.len())
    }
}

/// Remembers what it is told.
#[derive(Default)]
pub(crate) struct Notebook(Mutex<Vec<Event>>);

impl Notebook {
    pub(crate) fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap().clone()
    }
}

impl Audit for Notebook {
    fn tell(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

/// Depends on nothing.
pub(crate) struct Free;

impl Dependent for Free {
    fn accepts(&self, _: &dyn Rules) -> Result<(), String> {
        Ok(())
    }
}

/// A plane that was started, with what it talks to.
pub(crate) struct Rehearsal {
    pub(crate) plane: Arc<Mutex<Plane>>,
    pub(crate) kernel: Kernel,
    pub(crate) notebook: Arc<Notebook>,
}

impl Rehearsal {
    pub(crate) fn new(settings: &Settings, dependent: impl Dependent + 'static) -> Self {
        Self::with_state(settings, State::create().unwrap(), dependent)
    }

    pub(crate) fn with_state(settings: &Settings, state: State, dependent: impl Dependent + 'static) -> Self {
        Self::with_kernel(settings, state, dependent, Kernel::default())
    }

    /// On a kernel in which something is open already.
    pub(crate) fn with_kernel(
        settings: &Settings,
        state: State,
        dependent: impl Dependent + 'static,
        kernel: Kernel,
    ) -> Self {
        let notebook = Arc::new(Notebook::default());
        let first = Plane::first_rules(settings, &state).unwrap();
        let enforcer = Box::new(kernel.clone());
        let parts = Parts { state, enforcer, audit: notebook.clone(), dependent: Box::new(dependent) };
        let mut plane = Plane::open(settings, first, parts).unwrap();
        plane.start().unwrap();
        Self { plane: Arc::new(Mutex::new(plane)), kernel, notebook }
    }
}

/// Settings with these values and nothing else of the environment.
pub(crate) fn settings(values: &[(&str, &str)]) -> Settings {
    let found =
        |name: &str| values.iter().rev().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    Settings::read(&found).unwrap().0
}
