//! Small grammars of the command line: durations, `KEY=VALUE` pairs, environment files.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};

/// Parses `90`, `90s`, `10m`, `1h30m`, `2d` or `500ms`; a bare number counts seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let mut total = 0u64;
    let mut rest = text.trim();
    let problem = || format!("`{text}` is not a duration; write it like 90s, 10m or 1h30m");
    if rest.is_empty() {
        return Err(problem());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number: u64 = rest[..digits].parse().map_err(|_| problem())?;
        let tail = &rest[digits..];
        let letters = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let unit = match &tail[..letters] {
            "ms" => 1,
            "" if tail.is_empty() && digits == text.trim().len() => 1_000,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(problem()),
        };
        total = number.checked_mul(unit).and_then(|ms| total.checked_add(ms)).ok_or_else(problem)?;
        rest = &tail[letters..];
    }
    Ok(Duration::from_millis(total))
}

/// Parses `key=value`.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not of the form key=value")),
    }
}

/// Environment of a command: files first, then `-e`; a name without `=` takes the value of our own environment.
pub fn environment(files: &[std::path::PathBuf], given: &[String]) -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for file in files {
        read_file(file, &mut all)?;
    }
    for text in given {
        add(text, &mut all)?;
    }
    Ok(all)
}

fn read_file(path: &Path, all: &mut Vec<(String, String)>) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim_start();
        if !line.is_empty() && !line.starts_with('#') {
            add(line, all).with_context(|| format!("{}, line {}", path.display(), number + 1))?;
        }
    }
    Ok(())
}

fn add(text: &str, all: &mut Vec<(String, String)>) -> Result<()> {
    let (key, value) = match text.split_once('=') {
        Some((key, value)) => (key, Some(value.to_owned())),
        None => (text.trim(), std::env::var(text.trim()).ok()),
    };
    ensure!(!key.is_empty() && !key.contains(char::is_whitespace), "not a variable name before the `=`");
    all.retain(|(known, _)| known != key);
    all.extend(value.map(|value| (key.to_owned(), value)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let ms = |text| duration(text).unwrap().as_millis();
        assert_eq!(ms("90"), 90_000);
        assert_eq!(ms("90s"), 90_000);
        assert_eq!(ms("1h30m"), 5_400_000);
        assert_eq!(ms("2d"), 172_800_000);
        assert_eq!(ms("500ms"), 500);
        for bad in ["", "m", "10x", "-5", "1h30", "1.5h", "99999999999999999999d", "9999999999999999d"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn later_variables_win_and_files_come_first() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("env");
        fs::write(&file, "# comment\n\nA=1\n  B=x=y \nSANDGLASS_TEST_UNSET_NAME\n").unwrap();
        let env = environment(&[file], &["A=2".to_owned(), "C=".to_owned()]).unwrap();
        let expected = [("B", "x=y "), ("A", "2"), ("C", "")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(env, expected);
        assert!(environment(&[], &["=x".to_owned()]).is_err());
    }
}
