//! From logical lines to typed instructions.

use super::flags::Flags;
use super::instruction::{
    AddOptions, ArgDeclaration, CommandLine, Copy, CopySource, Healthcheck, Heredoc, Instruction, Located,
    NetworkMode, Run,
};
use super::lines::{self, LogicalLine, parse_heredoc};
use super::mount::Mount;
use super::words::raw_words;
use super::{Dockerfile, DockerfileError, SIZE_LIMIT, Stage};

/// The words that instructions begin with.
const KEYWORDS: &[&str] = &[
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "ONBUILD",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
];

pub(super) fn read(text: &str) -> Result<Dockerfile, DockerfileError> {
    if text.len() > SIZE_LIMIT {
        return Err(DockerfileError::new(0, "the file is larger than 1 MiB"));
    }
    let (directives, lines) = lines::split(text)?;
    let mut file = Dockerfile {
        syntax: directives.syntax,
        escape: directives.escape,
        global_args: Vec::new(),
        stages: Vec::new(),
    };
    for line in lines {
        let reader = Line::new(&line, directives.escape)?;
        if reader.keyword == "FROM" {
            let stage = reader.from()?;
            if stage.name.is_some() && file.stages.iter().any(|earlier| earlier.name == stage.name) {
                return Err(reader.error("the name of the stage is taken"));
            }
            file.stages.push(stage);
            continue;
        }
        let instruction = reader.instruction()?;
        match (file.stages.last_mut(), instruction) {
            (Some(stage), instruction) => stage.instructions.push(Located { line: line.number, instruction }),
            (None, Instruction::Arg(declarations)) => file.global_args.extend(declarations),
            (None, other) => {
                let message = format!("{} stands before the first FROM", other.keyword());
                return Err(DockerfileError::new(line.number, message));
            }
        }
    }
    if file.stages.is_empty() {
        return Err(DockerfileError::new(0, "the file has no FROM"));
    }
    Ok(file)
}

struct Line<'a> {
    keyword: &'static str,
    number: usize,
    arguments: &'a str,
    heredocs: &'a [Heredoc],
    escape: char,
}

impl<'a> Line<'a> {
    fn new(line: &'a LogicalLine, escape: char) -> Result<Self, DockerfileError> {
        Self::of_text(&line.text, line.number, &line.heredocs, escape)
    }

    fn of_text(
        text: &'a str,
        number: usize,
        heredocs: &'a [Heredoc],
        escape: char,
    ) -> Result<Self, DockerfileError> {
        let text = text.trim();
        let (word, arguments) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let Some(keyword) = KEYWORDS.iter().find(|keyword| keyword.eq_ignore_ascii_case(word)) else {
            let shown: String = word.chars().take(40).collect();
            return Err(DockerfileError::new(number, format!("the instruction {shown:?} is not known")));
        };
        Ok(Self { keyword, number, arguments: arguments.trim(), heredocs, escape })
    }

    fn error(&self, message: impl std::fmt::Display) -> DockerfileError {
        DockerfileError::new(self.number, format!("{}: {message}", self.keyword))
    }

    fn flags(&self) -> (Flags, &'a str) {
        Flags::split(self.keyword, self.number, self.arguments, self.escape)
    }

    /// The arguments as one text that must be there.
    fn text(&self) -> Result<String, DockerfileError> {
        match self.arguments {
            "" => Err(self.error("the argument is missing")),
            text => Ok(text.to_owned()),
        }
    }

    fn instruction(&self) -> Result<Instruction, DockerfileError> {
        Ok(match self.keyword {
            "ADD" => {
                let (copy, options) = self.copy(true)?;
                Instruction::Add(copy, options)
            }
            "ARG" => Instruction::Arg(self.arg()?),
            "CMD" => Instruction::Cmd(command_line(self.arguments)),
            "COPY" => Instruction::Copy(self.copy(false)?.0),
            "ENTRYPOINT" => Instruction::Entrypoint(command_line(&self.text()?)),
            "ENV" => Instruction::Env(self.pairs()?),
            "EXPOSE" => Instruction::Expose(self.list()?),
            "HEALTHCHECK" => Instruction::Healthcheck(self.healthcheck()?),
            "LABEL" => Instruction::Label(self.pairs()?),
            "MAINTAINER" => Instruction::Maintainer(self.text()?),
            "ONBUILD" => self.onbuild()?,
            "RUN" => Instruction::Run(self.run()?),
            "SHELL" => match json_array(self.arguments) {
                Some(words) if !words.is_empty() => Instruction::Shell(words),
                _ => return Err(self.error("the shell is not a JSON array of texts")),
            },
            "STOPSIGNAL" => Instruction::StopSignal(self.text()?),
            "USER" => Instruction::User(self.text()?),
            "VOLUME" => Instruction::Volume(match json_array(self.arguments) {
                Some(words) if !words.is_empty() => words,
                _ => self.list()?,
            }),
            "WORKDIR" => Instruction::Workdir(self.text()?),
            other => return Err(self.error(format!("{other} cannot stand here"))),
        })
    }

    fn from(&self) -> Result<Stage, DockerfileError> {
        let (mut flags, rest) = self.flags();
        let platform = flags.take("platform")?;
        flags.finish()?;
        let words: Vec<&str> = rest.split_whitespace().collect();
        let (image, name) = match words[..] {
            [image] => (image, None),
            [image, word, name] if word.eq_ignore_ascii_case("as") => {
                (image, Some(name.to_ascii_lowercase()))
            }
            _ => return Err(self.error("expected an image, or an image AS a name")),
        };
        if name.as_deref().is_some_and(|name| !is_stage_name(name)) {
            return Err(
                self.error("the name of a stage begins with a letter and holds letters, digits and `_-.`")
            );
        }
        Ok(Stage { name, image: image.to_owned(), platform, line: self.number, instructions: Vec::new() })
    }

    fn arg(&self) -> Result<Vec<ArgDeclaration>, DockerfileError> {
        let words = raw_words(self.arguments, self.escape);
        if words.is_empty() {
            return Err(self.error("the name is missing"));
        }
        words
            .into_iter()
            .map(|word| {
                let (name, default) = match word.split_once('=') {
                    Some((name, default)) => (name.to_owned(), Some(default.to_owned())),
                    None => (word, None),
                };
                if !is_variable_name(&name) {
                    return Err(self.error(format!("{name:?} is not a name of a variable")));
                }
                Ok(ArgDeclaration { name, default })
            })
            .collect()
    }

    /// `name=value …`, or the old `name value with blanks`.
    fn pairs(&self) -> Result<Vec<(String, String)>, DockerfileError> {
        let words = raw_words(self.arguments, self.escape);
        let Some(first) = words.first() else { return Err(self.error("the name is missing")) };
        if !first.contains('=') {
            let (name, value) = self
                .arguments
                .split_once(char::is_whitespace)
                .ok_or_else(|| self.error("the value is missing"))?;
            return Ok(vec![(name.to_owned(), value.trim_start().to_owned())]);
        }
        words
            .iter()
            .map(|word| match word.split_once('=') {
                Some(("", _)) => Err(self.error("a name is empty")),
                Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
                None => Err(self.error(format!("{word:?} has no `=`; quote values that hold blanks"))),
            })
            .collect()
    }

    fn list(&self) -> Result<Vec<String>, DockerfileError> {
        let words: Vec<String> = self.arguments.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() {
            return Err(self.error("the argument is missing"));
        }
        Ok(words)
    }

    fn copy(&self, is_add: bool) -> Result<(Copy, AddOptions), DockerfileError> {
        let (mut flags, rest) = self.flags();
        let mut copy = Copy {
            chown: flags.take("chown")?,
            chmod: flags.take("chmod")?,
            link: flags.take_switch("link")?.unwrap_or(false),
            exclude: flags.take_all("exclude")?,
            ..Copy::default()
        };
        let mut options = AddOptions::default();
        if is_add {
            options.checksum = flags.take("checksum")?;
            options.keep_git_dir = flags.take_switch("keep-git-dir")?.unwrap_or(false);
            options.unpack = flags.take_switch("unpack")?;
        } else {
            copy.from = flags.take("from")?;
            copy.parents = flags.take_switch("parents")?.unwrap_or(false);
        }
        flags.finish()?;
        let mut words =
            json_array(rest).unwrap_or_else(|| rest.split_whitespace().map(str::to_owned).collect());
        let destination = words.pop().filter(|_| !words.is_empty());
        copy.destination =
            destination.ok_or_else(|| self.error("expected at least one source and a destination"))?;
        let mut heredocs = self.heredocs.iter();
        for word in words {
            copy.sources.push(match parse_heredoc(&word).and_then(|_| heredocs.next()) {
                Some(heredoc) => CopySource::Inline(heredoc.clone()),
                None => CopySource::Path(word),
            });
        }
        if heredocs.next().is_some() || (copy.from.is_some() && !self.heredocs.is_empty()) {
            return Err(self.error("a here-document stands where no source can"));
        }
        Ok((copy, options))
    }

    fn run(&self) -> Result<Run, DockerfileError> {
        let (mut flags, rest) = self.flags();
        let mounts: Result<Vec<Mount>, String> =
            flags.take_all("mount")?.iter().map(|text| Mount::parse(text)).collect();
        let mounts = mounts.map_err(|message| self.error(format!("--mount: {message}")))?;
        let network = match flags.take("network")?.as_deref() {
            None | Some("default") => NetworkMode::Default,
            Some("none") => NetworkMode::None,
            Some("host") => NetworkMode::Host,
            Some(_) => return Err(self.error("--network is none of default, none and host")),
        };
        let run = Run {
            security: flags.take("security")?,
            devices: flags.take_all("device")?,
            command: command_line(rest),
            heredocs: self.heredocs.to_vec(),
            mounts,
            network,
        };
        flags.finish()?;
        match &run.command {
            CommandLine::Shell(text) if text.is_empty() => Err(self.error("the command is missing")),
            CommandLine::Exec(words) if words.is_empty() => Err(self.error("the command is missing")),
            _ => Ok(run),
        }
    }

    fn healthcheck(&self) -> Result<Healthcheck, DockerfileError> {
        let (mut flags, rest) = self.flags();
        let (interval, timeout) = (flags.take_duration("interval")?, flags.take_duration("timeout")?);
        let (start_period, start_interval) =
            (flags.take_duration("start-period")?, flags.take_duration("start-interval")?);
        let retries = match flags.take("retries")?.map(|text| text.parse()) {
            None => None,
            Some(Ok(number)) => Some(number),
            Some(Err(_)) => return Err(self.error("--retries is not a number")),
        };
        flags.finish()?;
        let (kind, command) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        if kind.eq_ignore_ascii_case("none") && command.is_empty() {
            return Ok(Healthcheck::None);
        }
        if !kind.eq_ignore_ascii_case("cmd") || command.is_empty() {
            return Err(self.error("expected CMD and a command, or NONE"));
        }
        let command = command_line(command);
        Ok(Healthcheck::Command { command, interval, timeout, start_period, start_interval, retries })
    }

    fn onbuild(&self) -> Result<Instruction, DockerfileError> {
        let text = self.text()?;
        let inner = Line::of_text(&text, self.number, self.heredocs, self.escape)?;
        if matches!(inner.keyword, "ONBUILD" | "FROM" | "MAINTAINER") {
            return Err(self.error(format!("{} cannot be a trigger", inner.keyword)));
        }
        let instruction = Box::new(inner.instruction()?);
        Ok(Instruction::Onbuild { text, instruction })
    }
}

/// A JSON array of texts, or text. What merely begins like an array is text, as it always was.
fn command_line(text: &str) -> CommandLine {
    match json_array(text) {
        Some(words) => CommandLine::Exec(words),
        None => CommandLine::Shell(text.trim().to_owned()),
    }
}

fn json_array(text: &str) -> Option<Vec<String>> {
    text.trim_start().starts_with('[').then(|| serde_json::from_str(text).ok()).flatten()
}

fn is_stage_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

fn is_variable_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}
