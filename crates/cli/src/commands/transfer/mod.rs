//! Copying between this machine and a sandbox, through the agent's file routes.

pub mod from_sandbox;
pub mod to_sandbox;

/// Entries that could not be copied although the rest could: path and reason.
#[derive(Debug, Default)]
pub struct Skipped(pub Vec<(String, String)>);

impl Skipped {
    fn add(&mut self, path: impl Into<String>, reason: impl Into<String>) {
        self.0.push((path.into(), reason.into()));
    }
}

/// `directory/name` without doubled slashes.
fn joined(directory: &str, name: &str) -> String {
    format!("{}/{name}", directory.trim_end_matches('/'))
}

/// The last component of a path inside a sandbox, `None` for `/`, `.` and `..`.
fn base_name(path: &str) -> Option<&str> {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    (!matches!(name, "" | "." | "..")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_joins() {
        assert_eq!(base_name("/a/b/"), Some("b"));
        assert_eq!(base_name("/a/."), None);
        assert_eq!(base_name("/"), None);
        assert_eq!(joined("/", "x"), "/x");
        assert_eq!(joined("/a/", "x"), "/a/x");
    }
}
