//! PostgreSQL's questions whether encryption may follow, which its clients put before everything else.

/// Bytes of a question; the server answers it with one.
const QUESTION: usize = 8;
/// `SSLRequest` and `GSSENCRequest`.
const QUESTIONS: [[u8; QUESTION]; 2] = [[0, 0, 0, 8, 4, 210, 22, 47], [0, 0, 0, 8, 4, 210, 22, 48]];
/// Each may be asked once.
pub const MOST: usize = QUESTIONS.len();

/// How many questions a client's first bytes begin with; nothing if the last one may still become one.
pub fn questions(bytes: &[u8]) -> Option<usize> {
    for asked in 0..MOST {
        let rest = behind(bytes, asked);
        if rest.len() < QUESTION && !rest.is_empty() && QUESTIONS.iter().any(|known| known.starts_with(rest))
        {
            return None;
        }
        if !QUESTIONS.iter().any(|known| rest.starts_with(known)) {
            return Some(asked);
        }
    }
    Some(MOST)
}

/// What follows so many questions.
pub fn behind(bytes: &[u8], questions: usize) -> &[u8] {
    bytes.get(questions * QUESTION..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_counted_when_they_are_whole() {
        let [tls, gss] = QUESTIONS;
        let both = [gss, tls].concat();
        for (bytes, expected) in [
            (&b""[..], Some(0)),
            (b"GET", Some(0)),
            (&[0, 0, 0, 8, 4], None),
            (&[0, 0, 0, 8, 5], Some(0)),
            (&tls, Some(1)),
            (&both, Some(2)),
            (&both[..12], None),
            (&[&tls[..], &[22, 3, 1]].concat(), Some(1)),
            (&[&both[..], &tls].concat(), Some(2)),
        ] {
            assert_eq!(questions(bytes), expected, "{bytes:?}");
        }
        assert_eq!(behind(&[&both[..], &tls].concat(), 2), tls);
    }
}
