//! What a language name in a request stands for, and what to say when an image lacks it.

/// The way code of a language is run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Way {
    Command,
    Background,
    /// The database that other agents bring their own client for.
    Sql,
    Kernel(String),
}

/// Languages that clients know by name, and what an image must have for them.
const KNOWN: [(&str, &str); 6] = [
    ("python", "`pip install ipykernel`"),
    ("bash", "`pip install bash_kernel && python3 -m bash_kernel.install`"),
    ("java", "a Java kernel such as IJava"),
    ("javascript", "a JavaScript kernel such as tslab (`npm install -g tslab && tslab install`)"),
    ("typescript", "a TypeScript kernel such as tslab (`npm install -g tslab && tslab install`)"),
    ("go", "a Go kernel such as gonb"),
];

pub(super) fn way(language: &str) -> Way {
    match language.to_ascii_lowercase().as_str() {
        "" | "command" => Way::Command,
        "background-command" => Way::Background,
        "sql" => Way::Sql,
        other => Way::Kernel(other.to_owned()),
    }
}

pub(super) fn not_installed(language: &str) -> String {
    match KNOWN.iter().find(|(known, _)| *known == language) {
        Some((_, install)) => format!("no {language} kernel in this image; install {install}"),
        // A name is repeated as far as names go.
        None => format!("unknown language: {language:.64} (no installed Jupyter kernel offers it)"),
    }
}
