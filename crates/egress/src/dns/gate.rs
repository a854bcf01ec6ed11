//! Decides about one question after the other.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType;

use crate::audit::{Audit, Event, Gate};
use crate::diagnostics::tell;
use crate::plane::{Admission, Plane};
use crate::policy::{Action, Rules};
use crate::settings::Level;

use super::answer::{Filter, Taken};
use super::question::{Question, Reason};
use super::upstream::Upstreams;

/// Whether the sandbox has any use for IPv6 addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    Both,
    Four,
}

/// Everything that answers need.
pub struct NameGate {
    pub plane: Arc<Mutex<Plane>>,
    pub upstreams: Arc<Upstreams>,
    pub audit: Arc<dyn Audit>,
    pub families: Families,
}

impl NameGate {
    /// The answer to a question. Its addresses are open when it is returned.
    pub async fn answer(&self, question: &Question) -> Message {
        if let Some(denied) = self.denied(question) {
            return denied;
        }
        if self.is_hidden(question.query.query_type) {
            return question.empty(ResponseCode::NoError, None);
        }
        let answer = match self.upstreams.ask(&question.query.name, question.query.query_type).await {
            Ok(answer) => answer,
            Err(problem) => {
                tell(Level::Warn, format_args!("{} is not resolved: {problem}", question.name));
                return question.empty(ResponseCode::ServFail, Some(&Reason::unreachable()));
            }
        };
        self.admitted(question, answer)
    }

    fn denied(&self, question: &Question) -> Option<Message> {
        let rule = if question.is_about_a_host() {
            let verdict = self.plane().rules().name(&question.name);
            (verdict.action == Action::Deny).then_some(verdict.rule)
        } else {
            Some("names of hosts have letters, digits, hyphens and underscores".into())
        };
        let rule = rule?;
        let reason = Reason::blocked(&rule);
        self.tell(&question.name, None, rule);
        Some(question.empty(ResponseCode::NXDomain, Some(&reason)))
    }

    fn is_hidden(&self, kind: RecordType) -> bool {
        match kind {
            RecordType::AAAA => self.families == Families::Four,
            RecordType::HTTPS | RecordType::SVCB => self.plane().hides_service_records(),
            _ => false,
        }
    }

    /// Filters the answer and opens what is left, by the rules of now: they may have changed since the question.
    fn admitted(&self, question: &Question, answer: Message) -> Message {
        let code = answer.metadata.response_code;
        let mut plane = self.plane();
        let rules = plane.rules().current();
        let filter = Filter {
            rules: &*rules,
            private: plane.private_answers(),
            hides_services: plane.hides_service_records(),
        };
        let taken = filter.take(&question.query.name, question.query.query_type, answer);
        let admission = if taken.addresses.is_empty() {
            Ok(Admission::of(rules.name(&question.name).action))
        } else {
            plane.admit(&question.name, &taken.addresses, taken.open_for())
        };
        drop(plane);
        match admission {
            Ok(Admission::Open) => self.written(question, code, taken),
            Ok(Admission::Denied) => {
                self.denied(question).unwrap_or_else(|| question.empty(ResponseCode::ServFail, None))
            }
            Err(error) => {
                tell(Level::Error, format_args!("{} is not let through: {error}", question.name));
                question.empty(ResponseCode::ServFail, None)
            }
        }
    }

    fn written(&self, question: &Question, code: ResponseCode, taken: Taken) -> Message {
        for (address, rule) in &taken.refused {
            self.tell(&question.name, Some(*address), rule.clone());
        }
        let reason = taken.refused.first().map(|(_, rule)| Reason::filtered(rule));
        let mut message = question.empty(code, reason.as_ref());
        message.answers = taken.records;
        message.authorities = taken.authorities;
        message
    }

    fn tell(&self, name: &str, address: Option<IpAddr>, rule: String) {
        self.audit.tell(Event::Denied {
            by: Gate::Dns,
            host: Some(name.to_owned()),
            address,
            port: None,
            rule,
        });
    }

    fn plane(&self) -> std::sync::MutexGuard<'_, Plane> {
        self.plane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
