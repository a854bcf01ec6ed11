//! The owner of what is in force: changes it as a whole or not at all.
//!
//! Invariant: a change is checked, then stored, then put into the kernel, then asked by the gates. Whatever fails, everything is as it was
//! before, the stored policy included.

pub mod file;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::audit::{Audit, Event};
use crate::diagnostics::tell;
use crate::dns::addresses;
use crate::enforcer::Enforcer;
use crate::firewall::{Asked, Connection, Doh, NameGate, Plan};
use crate::policy::always::{Always, AlwaysFiles};
use crate::policy::document::{Invalid, Policy};
use crate::policy::effective::{Effective, InForce};
use crate::policy::{Action, Rules};
use crate::resolved::{Moment, Resolved};
use crate::settings::{Level, PrivateAnswers, Settings, Switch};
use crate::state::{Kept, Section, State};

use file::PolicyFile;

const DNS: u16 = 53;
const HTTP: u16 = 80;
const HTTPS: u16 = 443;

/// Why a change was not made.
#[derive(Debug, Error)]
pub enum Unchanged {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A credential would be lent to a host that the policy does not let through.
    #[error("{0}")]
    Vault(String),
    #[error("cannot store the policy: {0}")]
    Store(#[source] io::Error),
    #[error("cannot put the policy into the kernel: {0}")]
    Kernel(#[source] io::Error),
}

/// Whether an address may be used for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Open,
    /// The policy has changed meanwhile.
    Denied,
}

impl Admission {
    pub fn of(action: Action) -> Self {
        match action {
            Action::Allow => Self::Open,
            Action::Deny => Self::Denied,
        }
    }
}

/// What becomes of connections of which nobody knows any more what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unknown {
    /// The rules are those that they were last judged by.
    Stays,
    /// If names decide: they may have been for one that is denied now.
    Ends,
}

/// Says what is wrong with rules for those who depend on them, which is the vault.
pub trait Dependent: Send {
    fn accepts(&self, rules: &dyn Rules) -> Result<(), String>;
}

/// The rules to begin with, and where they are from.
pub struct First {
    rules: Arc<InForce>,
    policy: Policy,
    always: Arc<Always>,
    files: AlwaysFiles,
    stored: PolicyFile,
}

impl First {
    /// The rules that every gate asks.
    pub fn rules(&self) -> Arc<InForce> {
        self.rules.clone()
    }
}

/// What the plane is made of.
pub struct Parts {
    pub state: State,
    pub enforcer: Box<dyn Enforcer>,
    pub audit: Arc<dyn Audit>,
    pub dependent: Box<dyn Dependent>,
}

/// Everything that decides.
pub struct Plane {
    rules: Arc<InForce>,
    policy: Policy,
    always: Arc<Always>,
    files: AlwaysFiles,
    stored: PolicyFile,
    kept: Kept,
    /// The rules that every connection was last judged by.
    judged: Kept,
    enforcer: Box<dyn Enforcer>,
    resolved: Resolved,
    audit: Arc<dyn Audit>,
    dependent: Box<dyn Dependent>,
    fixed: Fixed,
}

/// What no change of the policy changes.
struct Fixed {
    max_rules: usize,
    private_answers: PrivateAnswers,
    /// Ports whose connections are intercepted; none if TLS is not.
    intercept: Vec<u16>,
    dns_exempt: Vec<IpAddr>,
    doh: Doh,
}

impl Fixed {
    fn new(settings: &Settings) -> Self {
        let mut intercept = Vec::new();
        if settings.intercept.tls == Switch::On {
            intercept = vec![HTTP, HTTPS];
            intercept.extend(&settings.intercept.extra_ports);
            intercept.sort_unstable();
            intercept.dedup();
        }
        Self {
            max_rules: settings.max_rules,
            private_answers: settings.private_answers,
            intercept,
            dns_exempt: settings.dns.exempt.clone(),
            doh: settings.doh.clone(),
        }
    }
}

impl Plane {
    /// Reads the policy that is to be in force. Its gates may ask it already.
    pub fn first_rules(settings: &Settings, state: &State) -> io::Result<First> {
        let mut files = AlwaysFiles::new(&settings.always_folder);
        let always = files.changed()?.unwrap_or_default();
        let stored = PolicyFile::new(settings.policy_file.clone());
        let policy = first_policy(settings, &stored, &state.section(Section::Policy))?;
        let rules = Arc::new(InForce::new(Effective::new(&always, &policy)));
        Ok(First { rules, policy, always: Arc::new(always), files, stored })
    }

    /// Takes the rules over. Nothing is let through before [`Plane::start`].
    pub fn open(settings: &Settings, first: First, parts: Parts) -> io::Result<Self> {
        let First { rules, policy, always, files, stored } = first;
        let kept = parts.state.section(Section::Policy);
        kept.replace(&encoded(&policy))?;
        Ok(Self {
            rules,
            policy,
            always,
            files,
            stored,
            kept,
            judged: parts.state.section(Section::Judged),
            enforcer: parts.enforcer,
            resolved: Resolved::restore(parts.state.section(Section::Names))?,
            audit: parts.audit,
            dependent: parts.dependent,
            fixed: Fixed::new(settings),
        })
    }

    /// Puts the first rules into the kernel, and ends what an earlier worker has let through and they do not.
    pub fn start(&mut self) -> io::Result<()> {
        let rules = self.rules.current();
        self.enforcer.apply(&self.plan(&rules))?;
        // The earlier one may have died between storing a policy and enforcing it.
        let same = self.judged.read()? == rules.written();
        self.cut(&rules, if same { Unknown::Stays } else { Unknown::Ends })?;
        self.note_judged(&rules);
        Ok(())
    }

    /// The rules that every gate asks.
    pub fn rules(&self) -> Arc<InForce> {
        self.rules.clone()
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    pub fn always(&self) -> Arc<Always> {
        self.always.clone()
    }

    /// Puts another policy in force.
    pub fn set(&mut self, policy: Policy) -> Result<(), Unchanged> {
        let policy = policy.within(self.fixed.max_rules)?;
        let rules = Arc::new(Effective::new(&self.always, &policy));
        self.dependent.accepts(&*rules).map_err(Unchanged::Vault)?;
        let before = self.stored.write(&policy).map_err(Unchanged::Store)?;
        let kept = self.kept.replace(&encoded(&policy)).map_err(Unchanged::Store);
        if let Err(error) = kept.and_then(|()| self.enforce(rules).map_err(Unchanged::Kernel)) {
            if let Err(error) = self.stored.restore(before) {
                tell(Level::Error, format_args!("the stored policy is not the one in force: {error}"));
            }
            // The section held the old policy already: what fitted once fits again.
            let _ = self.kept.replace(&encoded(&self.policy));
            return Err(error);
        }
        self.policy = policy;
        let detail = format!("{}, {} rules", self.policy.mode(), self.policy.egress.len());
        self.audit.tell(Event::Noted { what: "policy-changed".into(), detail });
        Ok(())
    }

    /// Reads the files with rules that always apply again, if they have changed. Their rules hold whatever depends on others.
    pub fn refresh(&mut self) -> io::Result<Option<Arc<Always>>> {
        let Some(always) = self.files.changed()? else { return Ok(None) };
        let rules = Arc::new(Effective::new(&always, &self.policy));
        if let Err(error) = self.enforce(rules) {
            self.files.forget();
            return Err(error);
        }
        self.always = Arc::new(always);
        let detail = format!("{} denied, {} allowed", self.always.deny.len(), self.always.allow.len());
        self.audit.tell(Event::Noted { what: "always-rules-changed".into(), detail });
        Ok(Some(self.always.clone()))
    }

    /// Kernel first: what it lets through is never more than what the gates would.
    fn enforce(&mut self, next: Arc<Effective>) -> io::Result<()> {
        let before = self.rules.current();
        self.enforcer.apply(&self.plan(&next))?;
        self.rules.swap(next.clone());
        if let Err(error) = self.cut(&next, Unknown::Ends) {
            self.rules.swap(before.clone());
            if let Err(again) = self.enforcer.apply(&self.plan(&before)) {
                tell(
                    Level::Error,
                    format_args!("the kernel's rules are not those before the change: {again}"),
                );
            }
            return Err(error);
        }
        self.note_judged(&next);
        let private = self.fixed.private_answers;
        let allowed = |name: &str, address| is_open(&next, private, name, address);
        if let Err(error) = self.resolved.retain(allowed) {
            tell(
                Level::Warn,
                format_args!("names that were resolved are not kept for the next worker: {error}"),
            );
        }
        Ok(())
    }

    fn note_judged(&self, rules: &Effective) {
        if let Err(error) = self.judged.replace(&rules.written()) {
            // The next worker ends more than it has to.
            tell(Level::Warn, format_args!("the rules in force are not kept for the next worker: {error}"));
        }
    }

    /// Ends connections to what is not allowed any more. One address may serve several names: if one of them is denied now, a
    /// connection may be to that one.
    fn cut(&mut self, rules: &Effective, unknown: Unknown) -> io::Result<()> {
        let allowed = |name: &str| rules.name(name).action == Action::Allow;
        let known = self.resolved.by_address();
        let all_allowed: HashMap<IpAddr, bool> =
            known.into_iter().map(|(address, names)| (address, names.into_iter().all(allowed))).collect();
        let by_default = rules.default_action() == Action::Allow;
        let private = self.fixed.private_answers;
        let led_to = |address| by_default || addresses::refused(address, rules, private).is_none();
        let strict = unknown == Unknown::Ends && rules.names_matter();
        let has_forgotten = strict && self.resolved.has_forgotten();
        let exempt = &self.fixed.dns_exempt;
        let ended = self.enforcer.cut(&|connection: &Connection| {
            let address = connection.address;
            if connection.port == DNS && exempt.contains(&address) {
                return true;
            }
            if let Some(verdict) = rules.address(address) {
                return verdict.action == Action::Allow;
            }
            match (&connection.asked, all_allowed.get(&address)) {
                (Asked::Host(host), _) => allowed(host) && led_to(address),
                (Asked::Forgotten, _) if strict => false,
                (Asked::Nothing, _) if has_forgotten => false,
                (_, Some(all_allowed)) => *all_allowed && led_to(address),
                (_, None) => by_default,
            }
        })?;
        if ended > 0 {
            tell(Level::Info, format_args!("{ended} connections ended with the change of the rules"));
        }
        if has_forgotten && let Err(error) = self.resolved.start_over() {
            tell(
                Level::Warn,
                format_args!("names that were resolved are not kept for the next worker: {error}"),
            );
        }
        Ok(())
    }

    fn plan(&self, rules: &Effective) -> Plan {
        let private = self.fixed.private_answers;
        // Where everything passes by default, addresses of names need not be let through.
        let open = self.resolved.open(Moment::now()).filter(|_| rules.default_action() == Action::Deny);
        let still = open.filter(|(name, address, _)| is_open(rules, private, name, *address));
        let names = if rules.names_matter() { NameGate::On } else { NameGate::Off };
        // What travels in the clear is read request by request.
        let named_http = if names == NameGate::On { vec![HTTP] } else { Vec::new() };
        Plan {
            default: rules.default_action(),
            networks: rules.networks(),
            names,
            intercept: self.fixed.intercept.clone(),
            named_http,
            dynamic: still.map(|(_, address, left)| (address, left)).collect(),
            dns_exempt: self.fixed.dns_exempt.clone(),
            doh: self.fixed.doh.clone(),
        }
    }

    /// Whether HTTPS and SVCB answers would let a name past the gates.
    pub fn hides_service_records(&self) -> bool {
        self.rules.current().names_matter() || !self.fixed.intercept.is_empty()
    }

    pub fn private_answers(&self) -> PrivateAnswers {
        self.fixed.private_answers
    }

    /// Opens addresses that an allowed name has led to. The answer leaves only afterwards.
    pub fn admit(&mut self, name: &str, addresses: &[IpAddr], time: Duration) -> io::Result<Admission> {
        let rules = self.rules.current();
        if rules.name(name).action == Action::Deny {
            return Ok(Admission::Denied);
        }
        if rules.default_action() == Action::Deny {
            let timed: Vec<_> = addresses.iter().map(|address| (*address, time)).collect();
            self.enforcer.admit(&timed)?;
        }
        if let Err(error) = self.resolved.record(name, addresses, Moment::now().plus(time)) {
            tell(
                Level::Warn,
                format_args!("names that were resolved are not kept for the next worker: {error}"),
            );
        }
        Ok(Admission::Open)
    }

    /// Whether a name led to this address lately.
    pub fn leads_to(&self, name: &str, address: IpAddr) -> bool {
        self.resolved.leads_to(name, address, Moment::now())
    }
}

fn is_open(rules: &Effective, private: PrivateAnswers, name: &str, address: IpAddr) -> bool {
    rules.name(name).action == Action::Allow && addresses::refused(address, rules, private).is_none()
}

/// The one that an earlier worker had, else the stored one, else the one from the start.
fn first_policy(settings: &Settings, stored: &PolicyFile, kept: &Kept) -> io::Result<Policy> {
    let kept = kept.read()?;
    if !kept.is_empty() {
        return read_policy(&String::from_utf8_lossy(&kept));
    }
    match stored.read() {
        Ok(Some(policy)) => return Ok(policy),
        Ok(None) => {}
        Err(problem) => tell(Level::Warn, format_args!("{problem}; the policy of the start is used")),
    }
    read_policy(&settings.rules)
}

fn read_policy(text: &str) -> io::Result<Policy> {
    Policy::parse(text).map_err(|problem| io::Error::new(io::ErrorKind::InvalidInput, problem))
}

fn encoded(policy: &Policy) -> Vec<u8> {
    serde_json::to_vec(policy).expect("a policy is texts and words")
}

#[cfg(test)]
mod tests;
