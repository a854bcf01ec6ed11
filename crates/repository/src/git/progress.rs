//! How far git says it is.

/// One step of git's own counting: `Receiving objects:  45% (9/20)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// As git calls it: `Receiving objects`, `Resolving deltas`, `Updating files`.
    pub phase: String,
    /// 0 to 100; absent while git only counts.
    pub percent: Option<u8>,
    pub done: u64,
    /// Absent while the total is not known.
    pub total: Option<u64>,
}

impl Progress {
    /// Reads one line of git's standard error, `None` for any other line.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let line = line.trim().trim_start_matches("remote: ");
        let (phase, rest) = line.split_once(':')?;
        let rest = rest.trim_start();
        let phase = phase.to_owned();
        match rest.split_once('%') {
            Some((percent, rest)) => {
                let percent = percent.trim().parse().ok().filter(|percent| *percent <= 100)?;
                let (done, total) = rest.split_once('(')?.1.split_once(')')?.0.split_once('/')?;
                Some(Self {
                    phase,
                    percent: Some(percent),
                    done: done.parse().ok()?,
                    total: Some(total.parse().ok()?),
                })
            }
            None => {
                let counted = rest.trim_end_matches(", done.").split(',').next()?;
                let counting =
                    phase.ends_with("objects") || phase.ends_with("files") || phase.ends_with("deltas");
                Some(Self {
                    done: counting.then(|| counted.trim().parse().ok())??,
                    phase,
                    percent: None,
                    total: None,
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;

    #[test]
    fn lines_of_progress_are_read_and_others_are_not() {
        let read = |line| Progress::parse(line).map(|p| (p.phase, p.percent, p.done, p.total));
        assert_eq!(
            read("Receiving objects:  45% (9/20), 1.2 MiB | 3 MiB/s"),
            Some(("Receiving objects".into(), Some(45), 9, Some(20)))
        );
        assert_eq!(
            read("remote: Counting objects: 100% (7/7), done."),
            Some(("Counting objects".into(), Some(100), 7, Some(7)))
        );
        assert_eq!(
            read("remote: Enumerating objects: 12, done."),
            Some(("Enumerating objects".into(), None, 12, None))
        );
        assert_eq!(read("fatal: could not read Username for 'https://x': no"), None);
        assert_eq!(read("x: 900% (1/1)"), None);
        assert_eq!(read(""), None);
    }
}
