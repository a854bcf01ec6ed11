//! Small readers over JSON values that collect every mistake with its location instead of stopping at the first.
//!
//! The leniency of scalars is fixed here: integers also as integral floats and digit strings, booleans also as 0/1 and
//! words, strings only as strings, `null` on an optional field as absence, names in camel or snake case.

use std::collections::BTreeMap;

use sandglass_api::error::{FieldError, Loc};
use serde_json::{Map, Value};

use super::{
    error::{ApiError, ApiResult},
    instant,
};

/// More mistakes than this are not listed, so that an answer stays small whatever was sent.
const MAX_FINDINGS: usize = 64;
/// Longer names are cut in locations.
const MAX_NAME_CHARS: usize = 128;

/// Collects mistakes while a value is read. A reader that fails returns `None` and has left a finding.
#[derive(Debug)]
pub struct Findings {
    at: Vec<Loc>,
    list: Vec<FieldError>,
    count: usize,
}

impl Findings {
    /// Starts at `body`, `query` or `path`.
    pub fn new(root: &str) -> Self {
        Self { at: vec![Loc::from(root)], list: Vec::new(), count: 0 }
    }

    /// How many mistakes were found so far.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Notes a mistake at the current place.
    pub fn fault(&mut self, kind: &str, msg: impl Into<String>) {
        self.count += 1;
        if self.list.len() < MAX_FINDINGS {
            self.list.push(FieldError { kind: kind.to_owned(), loc: self.at.clone(), msg: msg.into() });
        }
    }

    /// Notes a broken rule at the current place.
    pub fn broken(&mut self, msg: &str) {
        self.fault("value_error", format!("Value error, {msg}"));
    }

    /// Reads one step deeper.
    pub fn within<T>(&mut self, step: impl Into<Loc>, read: impl FnOnce(&mut Self) -> T) -> T {
        let step = match step.into() {
            Loc::Field(name) => Loc::Field(name.chars().take(MAX_NAME_CHARS).collect()),
            index => index,
        };
        self.at.push(step);
        let value = read(self);
        self.at.pop();
        value
    }

    /// The value, or a 422 with everything that was found.
    pub fn finish<T>(self, value: Option<T>) -> ApiResult<T> {
        match value {
            Some(value) if self.count == 0 => Ok(value),
            _ => Err(ApiError::malformed(self.list)),
        }
    }

    /// An object with named fields.
    pub fn object<'v>(&mut self, value: &'v Value) -> Option<&'v Map<String, Value>> {
        let object = value.as_object();
        if object.is_none() {
            self.fault(
                "model_attributes_type",
                "Input should be a valid dictionary or object to extract fields from",
            );
        }
        object
    }

    /// A field that may be absent or `null`.
    pub fn optional<T>(
        &mut self,
        object: &Map<String, Value>,
        name: &str,
        read: impl FnOnce(&mut Self, &Value) -> Option<T>,
    ) -> Option<T> {
        let value = lookup(object, name).filter(|value| !value.is_null())?;
        self.within(name, |findings| read(findings, value))
    }

    /// A field that must be there.
    pub fn required<T>(
        &mut self,
        object: &Map<String, Value>,
        name: &str,
        read: impl FnOnce(&mut Self, &Value) -> Option<T>,
    ) -> Option<T> {
        match lookup(object, name) {
            Some(value) => self.within(name, |findings| read(findings, value)),
            None => {
                self.within(name, |findings| findings.fault("missing", "Field required"));
                None
            }
        }
    }

    /// Refuses fields other than these (in either spelling).
    pub fn only(&mut self, object: &Map<String, Value>, names: &[&str]) {
        for key in object.keys() {
            if !names.iter().any(|name| key == name || *key == snake_case(name)) {
                self.within(key.as_str(), |findings| {
                    findings.fault("extra_forbidden", "Extra inputs are not permitted");
                });
            }
        }
    }

    /// A string; nothing else is turned into one.
    pub fn string(&mut self, value: &Value) -> Option<String> {
        let text = value.as_str().map(str::to_owned);
        if text.is_none() {
            self.fault("string_type", "Input should be a valid string");
        }
        text
    }

    /// A string with at least one character.
    pub fn nonempty(&mut self, value: &Value) -> Option<String> {
        self.bounded(value, 1, usize::MAX)
    }

    /// A string of a certain length in characters.
    pub fn bounded(&mut self, value: &Value, min: usize, max: usize) -> Option<String> {
        let text = self.string(value)?;
        let length = text.chars().count();
        if length < min {
            self.fault("string_too_short", format!("String should have at least {min} character(s)"));
            return None;
        }
        if length > max {
            self.fault("string_too_long", format!("String should have at most {max} characters"));
            return None;
        }
        Some(text)
    }

    /// A string of a certain shape.
    pub fn shaped(
        &mut self,
        value: &Value,
        max: usize,
        pattern: &str,
        fits: fn(&str) -> bool,
    ) -> Option<String> {
        let text = self.bounded(value, 0, max)?;
        if fits(&text) {
            return Some(text);
        }
        self.fault("string_pattern_mismatch", format!("String should match pattern '{pattern}'"));
        None
    }

    /// One of a few words.
    pub fn word(&mut self, value: &Value, words: &[&str]) -> Option<String> {
        match value.as_str() {
            Some(text) if words.contains(&text) => Some(text.to_owned()),
            _ => {
                let list = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" or ");
                self.fault("literal_error", format!("Input should be {list}"));
                None
            }
        }
    }

    /// An integer in a range. What exceeds 64 bits counts as the largest number that fits.
    pub fn integer(&mut self, value: &Value, min: i64, max: i64) -> Option<i64> {
        let number = match value {
            Value::Number(number) => {
                if let Some(whole) = number.as_i64() {
                    Some(whole)
                } else if number.is_u64() {
                    Some(i64::MAX)
                } else {
                    let float = number.as_f64().unwrap_or(f64::NAN);
                    if float.fract() != 0.0 {
                        self.fault(
                            "int_from_float",
                            "Input should be a valid integer, got a number with a fractional part",
                        );
                        return None;
                    }
                    Some(saturate(float))
                }
            }
            Value::String(text) => return self.integer_text(text, min, max),
            _ => None,
        };
        let Some(number) = number else {
            self.fault("int_type", "Input should be a valid integer");
            return None;
        };
        self.in_range(number, min, max)
    }

    /// An integer written as text.
    pub fn integer_text(&mut self, text: &str, min: i64, max: i64) -> Option<i64> {
        let number = self.wide_integer_text(text)?;
        // What does not fit stays beyond every range.
        let clamped = number.clamp(i64::MIN.into(), i64::MAX.into());
        self.in_range(i64::try_from(clamped).unwrap_or(i64::MAX), min, max)
    }

    /// An integer of any size written as text; far beyond 64 bits it is only known to be large.
    pub fn wide_integer_text(&mut self, text: &str) -> Option<i128> {
        let number = parse_integer(text);
        if number.is_none() {
            self.fault(
                "int_parsing",
                "Input should be a valid integer, unable to parse string as an integer",
            );
        }
        number
    }

    fn in_range(&mut self, number: i64, min: i64, max: i64) -> Option<i64> {
        if number < min {
            self.fault("greater_than_equal", format!("Input should be greater than or equal to {min}"));
            return None;
        }
        if number > max {
            self.fault("less_than_equal", format!("Input should be less than or equal to {max}"));
            return None;
        }
        Some(number)
    }

    /// A boolean.
    pub fn boolean(&mut self, value: &Value) -> Option<bool> {
        match value {
            Value::Bool(flag) => Some(*flag),
            Value::String(text) => self.boolean_text(text),
            Value::Number(number) => match number.as_f64() {
                Some(0.0) => Some(false),
                Some(1.0) => Some(true),
                _ => self.no_boolean(),
            },
            _ => {
                self.fault("bool_type", "Input should be a valid boolean");
                None
            }
        }
    }

    /// A boolean written as a word.
    pub fn boolean_text(&mut self, text: &str) -> Option<bool> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "t" | "yes" | "y" | "on" => Some(true),
            "0" | "false" | "f" | "no" | "n" | "off" => Some(false),
            _ => self.no_boolean(),
        }
    }

    fn no_boolean(&mut self) -> Option<bool> {
        self.fault("bool_parsing", "Input should be a valid boolean, unable to interpret input");
        None
    }

    /// An instant, in Unix milliseconds.
    pub fn instant(&mut self, value: &Value) -> Option<i64> {
        let millis = match value {
            Value::String(text) => instant::from_text(text),
            Value::Number(number) => number.as_f64().and_then(instant::from_number),
            _ => {
                self.fault("datetime_type", "Input should be a valid datetime");
                return None;
            }
        };
        if millis.is_none() {
            self.fault("datetime_parsing", "Input should be a valid datetime");
        }
        millis
    }

    /// A list.
    pub fn list<T>(
        &mut self,
        value: &Value,
        min: usize,
        mut read: impl FnMut(&mut Self, &Value) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(items) = value.as_array() else {
            self.fault("list_type", "Input should be a valid list");
            return None;
        };
        if items.len() < min {
            self.fault("too_short", format!("List should have at least {min} item(s) after validation"));
            return None;
        }
        let mut all = Vec::with_capacity(items.len());
        let mut complete = true;
        for (index, item) in items.iter().enumerate() {
            match self.within(index, |findings| read(findings, item)) {
                Some(item) => all.push(item),
                None => complete = false,
            }
        }
        complete.then_some(all)
    }

    /// A list of strings.
    pub fn strings(&mut self, value: &Value, min: usize) -> Option<Vec<String>> {
        self.list(value, min, Self::string)
    }

    /// A map from text to something.
    pub fn map<T>(
        &mut self,
        value: &Value,
        mut read: impl FnMut(&mut Self, &Value) -> Option<T>,
    ) -> Option<BTreeMap<String, T>> {
        let Some(entries) = value.as_object() else {
            self.fault("dict_type", "Input should be a valid dictionary");
            return None;
        };
        let mut all = BTreeMap::new();
        let mut complete = true;
        for (key, item) in entries {
            match self.within(key.as_str(), |findings| read(findings, item)) {
                Some(item) => {
                    all.insert(key.clone(), item);
                }
                None => complete = false,
            }
        }
        complete.then_some(all)
    }

    /// A map from text to text.
    pub fn string_map(&mut self, value: &Value) -> Option<BTreeMap<String, String>> {
        self.map(value, Self::string)
    }

    /// A map from text to text or `null`.
    pub fn nullable_map(&mut self, value: &Value) -> Option<BTreeMap<String, Option<String>>> {
        self.map(
            value,
            |findings, item| if item.is_null() { Some(None) } else { findings.string(item).map(Some) },
        )
    }
}

fn lookup<'v>(object: &'v Map<String, Value>, name: &str) -> Option<&'v Value> {
    object.get(name).or_else(|| object.get(&snake_case(name)))
}

fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for letter in name.chars() {
        if letter.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Float casts saturate in Rust, which is what an integer too large for 64 bits needs.
#[expect(clippy::cast_possible_truncation, reason = "saturation at the ends of the range is intended")]
fn saturate(float: f64) -> i64 {
    float as i64
}

/// Digits with an optional sign, blanks around, single underscores between digits and an all-zero fraction.
fn parse_integer(text: &str) -> Option<i128> {
    let text = text.trim();
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if !fraction.bytes().all(|byte| byte == b'0') {
        return None;
    }
    let (negative, digits) = match whole.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, whole.strip_prefix('+').unwrap_or(whole)),
    };
    let groups: Vec<&str> = digits.split('_').collect();
    if groups.iter().any(|group| group.is_empty() || !group.bytes().all(|byte| byte.is_ascii_digit())) {
        return None;
    }
    let magnitude = groups.concat().parse::<i128>().unwrap_or(i128::MAX);
    Some(if negative { -magnitude } else { magnitude })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn integer(value: &Value) -> Option<i64> {
        Findings::new("body").integer(value, i64::MIN, i64::MAX)
    }

    #[test]
    fn integers_are_lenient_but_not_careless() {
        for (value, number) in [
            (json!(60), 60),
            (json!(60.0), 60),
            (json!("60"), 60),
            (json!(" +60 "), 60),
            (json!("6_0"), 60),
            (json!("60.00"), 60),
            (json!("-5"), -5),
            (json!(1e30), i64::MAX),
            (json!(u64::MAX), i64::MAX),
            (json!("99999999999999999999999"), i64::MAX),
        ] {
            assert_eq!(integer(&value), Some(number), "{value}");
        }
        for value in [
            json!(60.5),
            json!("60.5"),
            json!(""),
            json!("6__0"),
            json!("_6"),
            json!("x"),
            json!(true),
            json!([]),
        ] {
            assert_eq!(integer(&value), None, "{value}");
        }
    }

    #[test]
    fn booleans_accept_words_and_digits() {
        let read = |value: &Value| Findings::new("body").boolean(value);
        for value in [json!(true), json!(1), json!(1.0), json!("YES"), json!("t"), json!("on"), json!("1")] {
            assert_eq!(read(&value), Some(true), "{value}");
        }
        for value in [json!(false), json!(0), json!("no"), json!("F"), json!("off"), json!("n")] {
            assert_eq!(read(&value), Some(false), "{value}");
        }
        for value in [json!(2), json!("maybe"), json!(""), json!([])] {
            assert_eq!(read(&value), None, "{value}");
        }
    }

    #[test]
    fn findings_are_bounded() {
        let mut findings = Findings::new("body");
        let value = Value::Array(vec![json!(1); 10_000]);
        assert_eq!(findings.strings(&value, 0), None);
        assert_eq!(findings.finish(Some(())).unwrap_err().fields().len(), MAX_FINDINGS);
    }

    #[test]
    fn names_have_two_spellings() {
        assert_eq!(snake_case("createDurationMs"), "create_duration_ms");
        let object = json!({"create_duration_ms": 1});
        let mut findings = Findings::new("body");
        let object = findings.object(&object).unwrap();
        assert_eq!(findings.required(object, "createDurationMs", |f, v| f.integer(v, 0, 9)), Some(1));
    }
}
