//! Query strings, percent decoding, and JSON bodies read the forgiving way clients rely on.

use std::cell::Cell;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::reply::Failure;

/// Larger than any sensible command or replacement, small enough not to exhaust the box.
const MAX_JSON: usize = 32 << 20;
/// Values in one body: more than any list of files, and some 50 MB in memory at worst.
const MAX_VALUES: usize = 500_000;
/// A larger body is read when it is its turn, so that few of them are in memory at once.
const SMALL_JSON: usize = 64 << 10;
const LARGE_AT_ONCE: usize = 2;
/// A client that stops in the middle of its body does not keep the turn.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

static LARGE: Semaphore = Semaphore::const_new(LARGE_AT_ONCE);

pub struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(raw: Option<&str>) -> Self {
        let pairs = raw.unwrap_or("").split('&').filter(|p| !p.is_empty());
        Query(
            pairs
                .map(|pair| {
                    let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                    (decode(key, true), decode(value, true))
                })
                .collect(),
        )
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn required(&self, name: &str) -> Result<&str, Failure> {
        self.get(name).filter(|v| !v.is_empty()).ok_or_else(|| Failure::missing_query(name))
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Percent decoding; a damaged escape is kept as it is.
pub fn decode(text: &str, plus_is_space: bool) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = |i: usize| bytes.get(i).and_then(|b| char::from(*b).to_digit(16));
        match bytes[at] {
            b'%' => match (hex(at + 1), hex(at + 2)) {
                (Some(high), Some(low)) => {
                    out.push(u8::try_from(high * 16 + low).unwrap_or(b'?'));
                    at += 2;
                }
                _ => out.push(b'%'),
            },
            b'+' if plus_is_space => out.push(b' '),
            byte => out.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Reads a body to its end, within the bounds above.
pub async fn read_bytes(mut body: Incoming) -> Result<Bytes, Failure> {
    let failed = |reason: &str| Failure::invalid(format!("error reading request body. {reason}"));
    let (mut gathered, mut turn) = (BytesMut::new(), None);
    loop {
        let frame = match timeout(BODY_TIMEOUT, body.frame()).await {
            Err(_) => return Err(failed("nothing came for too long")),
            Ok(None) => return Ok(gathered.freeze()),
            Ok(Some(Err(error))) => return Err(failed(&error.to_string())),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue };
        let length = gathered.len() + data.len();
        if length > MAX_JSON {
            return Err(failed("length limit exceeded"));
        }
        if length > SMALL_JSON && turn.is_none() {
            turn = LARGE.acquire().await.ok();
        }
        gathered.extend_from_slice(&data);
    }
}

/// Reads the first JSON value of a body; whatever follows it is ignored, as the reference does.
pub async fn read_json(body: Incoming) -> Result<Value, Failure> {
    let bytes = read_bytes(body).await?;
    first_json(&bytes)
}

pub fn first_json(bytes: &[u8]) -> Result<Value, Failure> {
    let parse = |reason: String| {
        Failure::invalid(format!("error parsing request, MAYBE invalid body format. {reason}"))
    };
    let left = Cell::new(MAX_VALUES);
    let value = Budget(&left).deserialize(&mut serde_json::Deserializer::from_slice(bytes));
    value.map_err(|error| {
        parse(if error.is_eof() && bytes.trim_ascii().is_empty() { "EOF".into() } else { error.to_string() })
    })
}

/// Reads a value as long as there are not too many in it: a number takes one byte in a body and thirty in memory.
#[derive(Clone, Copy)]
struct Budget<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for Budget<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Budget<'_> {
    fn take<E: de::Error>(self) -> Result<(), E> {
        self.0.set(self.0.get().checked_sub(1).ok_or_else(|| E::custom("too many values"))?);
        Ok(())
    }
}

impl<'de> Visitor<'de> for Budget<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(value) = values.next_element_seed(self)? {
            self.take()?;
            all.push(value);
        }
        Ok(all.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(key) = entries.next_key()? {
            self.take()?;
            all.insert(key, entries.next_value_seed(self)?);
        }
        Ok(all.into())
    }
}

/// A JSON object read with keys matched ignoring case.
pub struct Object(Map<String, Value>);

impl Object {
    pub fn new(value: Value) -> Result<Self, Failure> {
        match value {
            Value::Object(map) => Ok(Object(map)),
            _ => Err(Failure::invalid(
                "error parsing request, MAYBE invalid body format. expected a JSON object",
            )),
        }
    }

    /// The raw value; an exact key wins over one that differs in case.
    pub fn raw(&self, key: &str) -> Option<&Value> {
        self.0.get(key).or_else(|| {
            self.0.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)).map(|(_, value)| value)
        })
    }

    fn present(&self, key: &str) -> Option<&Value> {
        self.raw(key).filter(|value| !value.is_null())
    }

    pub fn string(&self, key: &str) -> Result<Option<String>, Failure> {
        match self.present(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(wrong_type(key, "a string")),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, Failure> {
        match self.present(key) {
            None => Ok(None),
            Some(Value::Bool(on)) => Ok(Some(*on)),
            Some(_) => Err(wrong_type(key, "a boolean")),
        }
    }

    pub fn integer(&self, key: &str) -> Result<Option<i64>, Failure> {
        match self.present(key) {
            None => Ok(None),
            Some(value) => value.as_i64().map(Some).ok_or_else(|| wrong_type(key, "an integer")),
        }
    }
}

fn wrong_type(key: &str, wanted: &str) -> Failure {
    Failure::invalid(format!(
        "error parsing request, MAYBE invalid body format. field {key} must be {wanted}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_decode() {
        let query = Query::parse(Some("path=%2Fa%20b+c&path=x&e=&bad=%zz%4"));
        assert_eq!(query.all("path").collect::<Vec<_>>(), ["/a b c", "x"]);
        assert!(query.required("e").is_err());
        assert_eq!(query.get("bad"), Some("%zz%4"));
        assert_eq!(decode("a+b", false), "a+b");
    }

    #[test]
    fn a_body_of_very_many_values_is_refused_and_a_long_text_is_not() {
        let many = format!("[{}1]", "1,".repeat(MAX_VALUES + 1));
        assert!(first_json(many.as_bytes()).is_err());
        let text = format!("[\"{}\\\"\"]", ",[{".repeat(MAX_VALUES));
        assert!(first_json(text.as_bytes()).is_ok());
    }

    #[test]
    fn the_first_value_counts_and_case_does_not() {
        let object = Object::new(first_json(b"{\"Command\":\"x\",\"n\":null} garbage").unwrap()).unwrap();
        assert_eq!(object.string("command").unwrap().as_deref(), Some("x"));
        assert_eq!(object.integer("n").unwrap(), None);
        assert!(first_json(b"").is_err());
        assert!(object.flag("command").is_err());
    }

    #[test]
    fn json_is_read_as_it_is_up_to_a_number_of_values() {
        let text = r#"{"a":[1,-2,2.5,null,true,"x\u00e9",{"b":[]}],"a2":18446744073709551615,"a":"last"}"#;
        let expected: Value = serde_json::from_str(text).unwrap();
        assert_eq!(first_json(text.as_bytes()).unwrap(), expected);
        assert_eq!(first_json(b" 7 8").unwrap(), 7);
        let many = |count: usize| format!("[{}0]", "0,".repeat(count - 1)).into_bytes();
        assert!(first_json(&many(MAX_VALUES)).is_ok());
        assert!(first_json(&many(MAX_VALUES + 1)).unwrap_err().message.contains("too many values"));
    }
}
