//! Who may use a route to a sandbox that asks for a credential.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::guesses::Guesses;
use crate::keys::Keys;
use crate::mac;
use crate::route::{Proof, Route};
use crate::scope::ScopeError;
use crate::signature::{Generation, Malformed, Unverified};

/// Decides. Shared by all requests.
#[derive(Debug)]
pub struct Door {
    keys: Keys,
    /// With [`Generation::Full`] signatures that could be guessed open nothing.
    accepts: Generation,
    guesses: Guesses,
}

/// Now, on both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Unix seconds.
    pub wall: u64,
    pub steady: Instant,
}

impl Moment {
    #[must_use]
    pub fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { wall, steady: Instant::now() }
    }
}

/// What comes with a request.
#[derive(Clone, Copy, Debug)]
pub struct Presented<'a> {
    /// The first value of the secure-access header, if there is one, empty or not.
    pub token: Option<&'a [u8]>,
    pub route: &'a Route,
}

/// Why a request does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    #[error("this sandbox asks for its access token or a signed route")]
    Missing,
    #[error("the access token is wrong")]
    Token,
    #[error(transparent)]
    Signature(#[from] Unverified),
    #[error(transparent)]
    Scope(#[from] ScopeError),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("signed routes cannot be checked here: no keys are configured")]
    NoKeys,
    #[error("too many wrong credentials for this sandbox")]
    TooMany,
}

impl Door {
    #[must_use]
    pub fn new(keys: Keys, accepts: Generation) -> Self {
        Self { keys, accepts, guesses: Guesses::default() }
    }

    /// Whether routes with a proof are believed at all.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Admits to a sandbox whose token is `secret`; one without a token is open. A header decides alone: with a wrong one, a good signature does
    /// not help.
    ///
    /// # Errors
    /// When the request does not pass.
    pub fn admit(&self, secret: Option<&str>, presented: Presented<'_>, now: Moment) -> Result<(), Denied> {
        let Route { id, port, proof } = presented.route;
        // Whose word the whole route is must hold, whatever the sandbox asks for.
        if let Proof::Scoped(scope) = proof {
            if self.keys.is_empty() {
                return Err(Denied::NoKeys);
            }
            return self.counted(id, now, scope.verify(&self.keys).map_err(Denied::from));
        }
        let Some(secret) = secret.map(str::trim).filter(|secret| !secret.is_empty()) else { return Ok(()) };
        if let Some(token) = presented.token {
            let right = mac::same(token.trim_ascii(), secret.as_bytes());
            return self.counted(id, now, if right { Ok(()) } else { Err(Denied::Token) });
        }
        let Proof::Signed(signed) = proof else { return Err(Denied::Missing) };
        if self.keys.is_empty() {
            return Err(Denied::NoKeys);
        }
        if signed.is_guessable() {
            if self.accepts == Generation::Full {
                return self.counted(id, now, Err(Unverified::Mismatch.into()));
            }
            // Looked at before, because a right guess must not pass either.
            if !self.guesses.allow(id, now.steady) {
                return Err(Denied::TooMany);
            }
        }
        self.counted(id, now, signed.verify(&self.keys, (id, *port), now.wall).map_err(Denied::from))
    }

    /// What cannot be guessed passes whenever it is right, so that nobody can lock its holders out.
    fn counted(&self, id: &str, now: Moment, verdict: Result<(), Denied>) -> Result<(), Denied> {
        let Err(denied) = verdict else { return Ok(()) };
        let guessed = matches!(
            denied,
            Denied::Token | Denied::Signature(Unverified::Mismatch) | Denied::Scope(ScopeError::Mismatch)
        );
        if !guessed {
            return Err(denied);
        }
        let allowed = self.guesses.allow(id, now.steady);
        self.guesses.failed(id, now.steady);
        Err(if allowed { denied } else { Denied::TooMany })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base36::Expiry;
    use crate::keys::Key;
    use crate::scope::Scope;

    fn key(id: char) -> Key {
        Key { id, secret: vec![id as u8; 32] }
    }

    fn at(wall: u64) -> Moment {
        Moment { wall, steady: Instant::now() }
    }

    fn door(accepts: Generation) -> Door {
        Door::new(Keys::new([key('a')]), accepts)
    }

    fn signed(generation: Generation, by: char) -> Route {
        Route::signed(&key(by), generation, ("box", 80), Expiry::at(100))
    }

    #[test]
    fn the_table_of_admission() {
        use Generation::{Full, Short};
        let plain = Route::plain("box", 80);
        let elsewhere = Route { port: 81, ..signed(Short, 'a') };
        let right = Some(&b" token "[..]);
        type Case<'a> = (Option<&'a str>, Option<&'a [u8]>, &'a Route, u64, Result<(), Denied>);
        let cases: &[Case<'_>] = &[
            (None, None, &plain, 0, Ok(())),
            (Some(" "), None, &plain, 0, Ok(())),
            (None, Some(b"nonsense"), &signed(Short, 'z'), 999, Ok(())),
            (Some("token"), right, &plain, 0, Ok(())),
            (Some("token"), None, &plain, 0, Err(Denied::Missing)),
            (Some("token"), Some(b"tokem"), &plain, 0, Err(Denied::Token)),
            // The header decides alone, even an empty one.
            (Some("token"), Some(b"no"), &signed(Full, 'a'), 0, Err(Denied::Token)),
            (Some("token"), Some(b""), &signed(Full, 'a'), 0, Err(Denied::Token)),
            (Some("token"), right, &signed(Full, 'z'), 999, Ok(())),
            (Some("token"), None, &signed(Full, 'a'), 100, Ok(())),
            (Some("token"), None, &signed(Short, 'a'), 100, Ok(())),
            (Some("token"), None, &signed(Short, 'a'), 101, Err(Unverified::Expired.into())),
            // Expired is told before the key.
            (Some("token"), None, &signed(Short, 'z'), 101, Err(Unverified::Expired.into())),
            (Some("token"), None, &signed(Short, 'z'), 100, Err(Unverified::UnknownKey.into())),
            (Some("token"), None, &elsewhere, 100, Err(Unverified::Mismatch.into())),
        ];
        let door = door(Short);
        for (secret, token, route, now, expected) in cases {
            let verdict = door.admit(*secret, Presented { token: *token, route }, at(*now));
            assert_eq!(verdict, *expected, "{secret:?} {token:?} {route:?} {now}");
        }
    }

    #[test]
    fn without_keys_signatures_cannot_be_checked() {
        let door = Door::new(Keys::default(), Generation::Short);
        let route = signed(Generation::Full, 'a');
        let presented = Presented { token: None, route: &route };
        assert_eq!(door.admit(Some("token"), presented, at(0)), Err(Denied::NoKeys));
        assert_eq!(door.admit(None, presented, at(0)), Ok(()));
    }

    #[test]
    fn short_signatures_open_nothing_where_full_ones_are_made() {
        let door = door(Generation::Full);
        let route = signed(Generation::Short, 'a');
        let verdict = door.admit(Some("token"), Presented { token: None, route: &route }, at(0));
        assert_eq!(verdict, Err(Unverified::Mismatch.into()));
        let route = signed(Generation::Full, 'a');
        assert_eq!(door.admit(Some("token"), Presented { token: None, route: &route }, at(0)), Ok(()));
    }

    #[test]
    fn guessing_is_slowed_down_and_what_cannot_be_guessed_still_passes() {
        let door = door(Generation::Short);
        let now = at(0);
        let wrong = Route { port: 81, ..signed(Generation::Short, 'a') };
        let verdicts: Vec<_> = (0..100)
            .map(|_| door.admit(Some("token"), Presented { token: None, route: &wrong }, now))
            .collect();
        assert_eq!(verdicts[0], Err(Unverified::Mismatch.into()));
        assert_eq!(verdicts[99], Err(Denied::TooMany));
        let admit = |token, route: &Route| door.admit(Some("token"), Presented { token, route }, now);
        assert_eq!(admit(None, &signed(Generation::Short, 'a')), Err(Denied::TooMany));
        assert_eq!(admit(None, &signed(Generation::Full, 'a')), Ok(()));
        assert_eq!(admit(Some(b"token"), &wrong), Ok(()));
        assert_eq!(admit(Some(b"wrong"), &wrong), Err(Denied::TooMany));
        let other = Route { id: "other".to_owned(), ..wrong };
        assert_eq!(admit(None, &other), Err(Unverified::Mismatch.into()));
    }

    #[test]
    fn a_token_of_a_whole_route_is_checked_for_every_sandbox() {
        let door = door(Generation::Full);
        let route = |by| {
            let scope = Scope::mint(&key(by), "ns", "box", 80).unwrap();
            Route { id: "box".to_owned(), port: 80, proof: Proof::Scoped(scope) }
        };
        for secret in [None, Some("token")] {
            let admit = |route: &Route| door.admit(secret, Presented { token: None, route }, at(0));
            assert_eq!(admit(&route('a')), Ok(()));
            assert_eq!(admit(&route('z')), Err(ScopeError::UnknownKey.into()));
        }
    }
}
