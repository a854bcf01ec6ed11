//! Settings that are one of a few words: a real enum with the words written once.

/// An enum whose variants are spelt as fixed words in the file.
pub trait Choice: Copy + PartialEq + 'static {
    /// Every word with its variant, in the order the reference page lists them.
    const WORDS: &'static [(&'static str, Self)];

    /// Whether `Docker` is accepted for `docker`.
    const ANY_CASE: bool = false;

    /// The word for this variant (the first one, when several are accepted).
    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, variant)| *variant == self).map_or("", |(word, _)| word)
    }
}

/// Declares an enum together with its words.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant),+ }

        impl $crate::config::Choice for $name {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, Self::$variant)),+];
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($crate::config::Choice::word(*self))
            }
        }
    };
}
pub(super) use choice;
