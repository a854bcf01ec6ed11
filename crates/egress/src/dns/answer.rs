//! What is taken from a resolver's answer: the records that the question leads to, without addresses that names must not lead to.

use std::net::IpAddr;
use std::time::Duration;

use hickory_proto::op::Message;
use hickory_proto::rr::rdata::{A, AAAA};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use crate::policy::Rules;
use crate::resolved::MOST_PER_ANSWER;
use crate::settings::PrivateAnswers;

use super::addresses;

/// Aliases that are followed.
const MOST_ALIASES: usize = 16;

/// Records that are passed on.
const MOST_RECORDS: usize = 128;

/// Longest time that an answer may be kept: shorter than its addresses stay open.
const LONGEST_TTL: u32 = 300;

const SHORTEST_OPEN: u64 = 60;
const LONGEST_OPEN: u64 = 360;

/// What is left of an answer.
#[derive(Debug, Default)]
pub struct Taken {
    pub records: Vec<Record>,
    pub authorities: Vec<Record>,
    pub addresses: Vec<IpAddr>,
    /// Addresses that were left out, with the rule.
    pub refused: Vec<(IpAddr, String)>,
    /// The greatest lifetime of an address.
    ttl: u32,
}

/// How answers are filtered.
pub struct Filter<'a> {
    pub rules: &'a dyn Rules,
    pub private: PrivateAnswers,
    /// HTTPS and SVCB records are left out.
    pub hides_services: bool,
}

impl Taken {
    /// How long the addresses are open: longer than anybody keeps the answer.
    pub fn open_for(&self) -> Duration {
        Duration::from_secs((u64::from(self.ttl) + 60).clamp(SHORTEST_OPEN, LONGEST_OPEN))
    }
}

impl Filter<'_> {
    /// Takes what belongs to the question. Addresses at the end of aliases count as the asked name's.
    pub fn take(&self, name: &Name, kind: RecordType, answer: Message) -> Taken {
        let owners = chain(name, &answer.answers);
        let mut taken = Taken::default();
        for record in answer.answers {
            let belongs = record.dns_class == DNSClass::IN && owners.contains(&record.name);
            if belongs && self.is_asked_for(&record, kind) && taken.records.len() < MOST_RECORDS {
                self.add(record, &mut taken);
            }
        }
        let soa = answer.authorities.into_iter().find(|record| record.record_type() == RecordType::SOA);
        taken.authorities.extend(soa.map(shortened));
        taken
    }

    fn is_asked_for(&self, record: &Record, kind: RecordType) -> bool {
        let found = record.record_type();
        match found {
            RecordType::HTTPS | RecordType::SVCB if self.hides_services => false,
            RecordType::OPT | RecordType::TSIG | RecordType::RRSIG => false,
            _ => found == kind || found == RecordType::CNAME || kind == RecordType::ANY,
        }
    }

    fn add(&self, record: Record, taken: &mut Taken) {
        let address = match record.data {
            RData::A(A(four)) => IpAddr::V4(four),
            RData::AAAA(AAAA(six)) => IpAddr::V6(six),
            _ => return taken.records.push(shortened(record)),
        };
        if let Some(rule) = addresses::refused(address, self.rules, self.private) {
            taken.refused.push((address, rule));
        } else if taken.addresses.len() < MOST_PER_ANSWER {
            taken.ttl = taken.ttl.max(record.ttl);
            taken.addresses.push(address);
            taken.records.push(shortened(record));
        }
    }
}

fn shortened(mut record: Record) -> Record {
    record.ttl = record.ttl.min(LONGEST_TTL);
    record
}

/// The name and what it is an alias of, as far as the answer says.
fn chain(name: &Name, records: &[Record]) -> Vec<Name> {
    let mut owners = vec![name.clone()];
    while owners.len() <= MOST_ALIASES {
        let last = &owners[owners.len() - 1];
        let next = records.iter().find_map(|record| match &record.data {
            RData::CNAME(target) if record.name == *last => Some(target.0.clone()),
            _ => None,
        });
        match next {
            Some(next) if !owners.contains(&next) => owners.push(next),
            _ => break,
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::{CNAME, TXT};

    use super::*;
    use crate::policy::always::Always;
    use crate::policy::document::Policy;
    use crate::policy::effective::Effective;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn a(owner: &str, ttl: u32, address: [u8; 4]) -> Record {
        Record::from_rdata(name(owner), ttl, RData::A(A(address.into())))
    }

    fn alias(owner: &str, target: &str) -> Record {
        Record::from_rdata(name(owner), 5, RData::CNAME(CNAME(name(target))))
    }

    fn take(records: Vec<Record>, kind: RecordType) -> Taken {
        let rules = Effective::new(&Always::default(), &Policy::deny_all());
        let mut answer = Message::query();
        answer.answers = records;
        let filter = Filter { rules: &rules, private: PrivateAnswers::Stripped, hides_services: true };
        filter.take(&name("a.test."), kind, answer)
    }

    #[test]
    fn only_what_the_question_leads_to_is_taken() {
        let taken = take(
            vec![
                alias("A.test.", "b.test."),
                alias("b.test.", "c.test."),
                a("c.test.", 1000, [192, 0, 2, 1]),
                a("other.test.", 1000, [192, 0, 2, 66]),
                Record::from_rdata(name("a.test."), 5, RData::TXT(TXT::new(vec!["x".into()]))),
            ],
            RecordType::A,
        );
        assert_eq!(taken.addresses, [IpAddr::from([192, 0, 2, 1])]);
        assert_eq!(taken.records.len(), 3);
        assert_eq!(taken.records[2].ttl, LONGEST_TTL);
        assert_eq!(taken.open_for(), Duration::from_secs(360));
    }

    #[test]
    fn aliases_that_run_in_circles_end() {
        let circle =
            vec![alias("a.test.", "b.test."), alias("b.test.", "a.test."), a("b.test.", 1, [192, 0, 2, 1])];
        assert_eq!(take(circle, RecordType::A).addresses.len(), 1);
        let long: Vec<_> = (0..40)
            .map(|i| {
                alias(
                    &if i == 0 { "a.test.".into() } else { format!("{i}.test.") },
                    &format!("{}.test.", i + 1),
                )
            })
            .collect();
        assert_eq!(take(long, RecordType::A).records.len(), MOST_ALIASES + 1);
    }

    #[test]
    fn addresses_that_names_must_not_lead_to_are_left_out() {
        let taken = take(
            vec![
                a("a.test.", 0, [127, 0, 0, 1]),
                a("a.test.", 0, [192, 0, 2, 1]),
                a("a.test.", 0, [10, 0, 0, 1]),
            ],
            RecordType::ANY,
        );
        assert_eq!(taken.addresses, [IpAddr::from([192, 0, 2, 1])]);
        assert_eq!(taken.refused.len(), 2);
        assert_eq!(taken.open_for(), Duration::from_secs(60));
    }

    #[test]
    fn the_number_of_addresses_is_bounded() {
        let many = (0..200).map(|last| a("a.test.", 1, [192, 0, 2, last])).collect();
        assert_eq!(take(many, RecordType::A).records.len(), MOST_PER_ANSWER);
    }
}
