//! Numbers in base 36, lower case.

const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// A Unix second as it stands in a route. The text is kept, because the signature is over the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expiry {
    text: String,
    seconds: u64,
}

impl Expiry {
    #[must_use]
    pub fn at(seconds: u64) -> Self {
        Self { text: encode(u128::from(seconds)), seconds }
    }

    /// One to thirteen digits without a leading zero.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let well_formed = (1..=13).contains(&text.len()) && (text == "0" || !text.starts_with('0'));
        let seconds = u64::try_from(decode(text).filter(|_| well_formed)?).ok()?;
        Some(Self { text: text.to_owned(), seconds })
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    #[must_use]
    pub fn seconds(&self) -> u64 {
        self.seconds
    }

    /// The second itself still counts.
    #[must_use]
    pub fn is_over(&self, now: u64) -> bool {
        now > self.seconds
    }
}

/// Without leading zeros; `0` for zero.
pub(crate) fn encode(mut number: u128) -> String {
    let mut digits = Vec::new();
    loop {
        // The remainder is below 36.
        digits.push(DIGITS[(number % 36) as usize]);
        number /= 36;
        if number == 0 {
            break;
        }
    }
    digits.iter().rev().map(|digit| char::from(*digit)).collect()
}

/// With leading zeros up to `width`; `None` when it does not fit.
pub(crate) fn padded(number: u128, width: usize) -> Option<String> {
    let digits = encode(number);
    (digits.len() <= width).then(|| format!("{digits:0>width$}"))
}

/// `None` for anything but lower-case digits, and for what does not fit.
pub(crate) fn decode(text: &str) -> Option<u128> {
    if text.is_empty() {
        return None;
    }
    text.bytes().try_fold(0_u128, |number, byte| {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'z' => byte - b'a' + 10,
            _ => return None,
        };
        number.checked_mul(36)?.checked_add(u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiries_are_read_and_written() {
        for (seconds, text) in [
            (0, "0"),
            (35, "z"),
            (1_893_456_000, "vbbc00"),
            (4_102_444_800, "1vuhmo0"),
            (2_000_000_000, "x2qxvk"),
            (1_900_000_000, "vf7lds"),
            (u64::MAX, "3w5e11264sgsf"),
        ] {
            assert_eq!(Expiry::at(seconds).as_str(), text);
            assert_eq!(Expiry::parse(text).map(|e| e.seconds()), Some(seconds));
        }
        for wrong in [
            "",
            "00",
            "01",
            "Z",
            "-1",
            "+1",
            " 1",
            "3w5e11264sgsg",
            "zzzzzzzzzzzzz",
            "10000000000000",
            "1_0",
            "é",
        ] {
            assert_eq!(Expiry::parse(wrong), None, "{wrong}");
        }
        let expiry = Expiry::at(100);
        assert!(!expiry.is_over(99) && !expiry.is_over(100) && expiry.is_over(101));
    }

    #[test]
    fn padding_keeps_the_number() {
        assert_eq!(padded(0, 3).as_deref(), Some("000"));
        assert_eq!(padded(65_535, 4).as_deref(), Some("1ekf"));
        assert_eq!(padded(36 * 36, 2), None);
        assert_eq!(padded(u128::MAX, 25).map(|t| decode(&t)), Some(Some(u128::MAX)));
        assert_eq!(decode("zzzzzzzzzzzzzzzzzzzzzzzzzzzz"), None);
    }
}
