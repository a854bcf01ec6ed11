//! Instructions as types. Texts are as written until [`super::Variables`] expands them.

use std::time::Duration;

use super::mount::Mount;

/// An instruction and the line it begins on, from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    pub line: usize,
    pub instruction: Instruction,
}

/// One instruction. `FROM` is the [`super::Stage`] around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    Add(Copy, AddOptions),
    Arg(Vec<ArgDeclaration>),
    Cmd(CommandLine),
    Copy(Copy),
    Entrypoint(CommandLine),
    Env(Vec<(String, String)>),
    /// `80`, `80/tcp`, `8000-8010/udp`.
    Expose(Vec<String>),
    Healthcheck(Healthcheck),
    Label(Vec<(String, String)>),
    Maintainer(String),
    /// What runs when the image is a base, as text and as read.
    Onbuild {
        text: String,
        instruction: Box<Instruction>,
    },
    Run(Run),
    Shell(Vec<String>),
    StopSignal(String),
    User(String),
    Volume(Vec<String>),
    Workdir(String),
}

impl Instruction {
    /// The word it begins with.
    pub fn keyword(&self) -> &'static str {
        match self {
            Self::Add(..) => "ADD",
            Self::Arg(_) => "ARG",
            Self::Cmd(_) => "CMD",
            Self::Copy(_) => "COPY",
            Self::Entrypoint(_) => "ENTRYPOINT",
            Self::Env(_) => "ENV",
            Self::Expose(_) => "EXPOSE",
            Self::Healthcheck(_) => "HEALTHCHECK",
            Self::Label(_) => "LABEL",
            Self::Maintainer(_) => "MAINTAINER",
            Self::Onbuild { .. } => "ONBUILD",
            Self::Run(_) => "RUN",
            Self::Shell(_) => "SHELL",
            Self::StopSignal(_) => "STOPSIGNAL",
            Self::User(_) => "USER",
            Self::Volume(_) => "VOLUME",
            Self::Workdir(_) => "WORKDIR",
        }
    }
}

/// `ARG name` or `ARG name=default`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgDeclaration {
    pub name: String,
    pub default: Option<String>,
}

/// The two forms of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandLine {
    /// A JSON array: run as it is.
    Exec(Vec<String>),
    /// Text for the stage's shell.
    Shell(String),
}

/// `COPY`, and what `ADD` shares with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copy {
    /// At least one.
    pub sources: Vec<CopySource>,
    /// With its trailing slash, which says that it is a folder.
    pub destination: String,
    /// A stage's name or number, or an image.
    pub from: Option<String>,
    pub chown: Option<String>,
    pub chmod: Option<String>,
    pub link: bool,
    pub parents: bool,
    pub exclude: Vec<String>,
}

/// What only `ADD` knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AddOptions {
    pub checksum: Option<String>,
    pub keep_git_dir: bool,
    /// Whether archives are unpacked; by default local ones are and downloaded ones are not.
    pub unpack: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopySource {
    /// In the context or in `--from`; may hold `*`, `?` and `[…]`. For `ADD` also an address.
    Path(String),
    /// A file that stands in the Dockerfile; its name is the here-document's.
    Inline(Heredoc),
}

/// Text between `<<NAME` and `NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heredoc {
    pub name: String,
    /// Whether variables in it are expanded: the name was not quoted.
    pub expand: bool,
    /// Whether leading tabs were taken off: `<<-`.
    pub chomp: bool,
    /// With the line break at its end.
    pub content: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub command: CommandLine,
    pub heredocs: Vec<Heredoc>,
    pub mounts: Vec<Mount>,
    pub network: NetworkMode,
    /// `--security`, as written.
    pub security: Option<String>,
    /// `--device`, as written.
    pub devices: Vec<String>,
}

/// What of the network a `RUN` sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NetworkMode {
    #[default]
    Default,
    None,
    Host,
}

/// What a `RUN` comes down to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Script {
    /// Run as it is.
    Exec(Vec<String>),
    /// Handed to the stage's shell as its last argument.
    Shell(String),
    /// A file with `#!` in its first line, to be made executable and run.
    Program(String),
}

impl Run {
    /// The command together with its here-documents.
    pub fn script(&self) -> Script {
        let text = match &self.command {
            CommandLine::Exec(arguments) => return Script::Exec(arguments.clone()),
            CommandLine::Shell(text) => text,
        };
        // Nothing but a here-document: its content is the script.
        if let [only] = self.heredocs.as_slice()
            && text.trim_start().starts_with("<<")
            && text.split_whitespace().count() == 1
        {
            return match only.content.starts_with("#!") {
                true => Script::Program(only.content.clone()),
                false => Script::Shell(only.content.clone()),
            };
        }
        let mut script = text.clone();
        for heredoc in &self.heredocs {
            script.push('\n');
            script.push_str(&heredoc.content);
            script.push_str(&heredoc.name);
        }
        if !self.heredocs.is_empty() {
            script.push('\n');
        }
        Script::Shell(script)
    }
}

/// `HEALTHCHECK`. Durations are absent where the image's default holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Healthcheck {
    None,
    Command {
        command: CommandLine,
        interval: Option<Duration>,
        timeout: Option<Duration>,
        start_period: Option<Duration>,
        start_interval: Option<Duration>,
        retries: Option<u32>,
    },
}
