//! What the start script of such images did before the entrypoint: a script whose variables everybody gets, and other spellings of the command.

use std::io;
use std::path::{Path, PathBuf};

use crate::accounts::Identity;
use crate::command::pipes::{self, Read};
use crate::envs::{self, Env};
use crate::init::reap::{Exit, Reaper};
use crate::init::spawn::{self, Launch};

/// The flag by which the script's shell asks for its environment, in the agent's own words.
pub const DUMP_FLAG: &str = "--dump-environment";
const PRE_SCRIPT: &str = "EXECD_BOOTSTRAP_PRE_SCRIPT";
/// An environment is smaller; reading stops here.
const MAX_DUMP: usize = 4 << 20;
/// The script's output is the box's; only the environment goes to the agent.
const SOURCE: &str = "exec 3>&1 1>&2; . \"$1\" 3>&-; exec \"$0\" --dump-environment >&3 3>&-";

/// The argument vector that a command comes down to; `BOOTSTRAP_CMD` replaces it, and `-c` means a shell.
pub fn command(argv: Vec<String>, env: &Env) -> Result<Vec<String>, String> {
    let text = |name: &str| env.get(name).filter(|text| !text.is_empty());
    let line = match text("BOOTSTRAP_CMD") {
        Some(line) => line.clone(),
        None if argv.first().is_some_and(|first| first == "-c") => argv[1..].join(" "),
        None => return Ok(argv),
    };
    Ok(vec![shell(env)?, "-c".to_owned(), line])
}

/// The shell that people get who ask for nothing.
pub fn shell(env: &Env) -> Result<String, String> {
    if let Some(named) = env.get("BOOTSTRAP_SHELL").filter(|name| !name.is_empty()) {
        return Ok(named.clone());
    }
    let found = spawn::find_shell(envs::search_path(env));
    found.map(str::to_owned).ok_or_else(|| "no shell (bash or sh) in this image".to_owned())
}

/// The script that is to be read first.
pub fn pre_script(env: &Env) -> Option<PathBuf> {
    let named = env.get(PRE_SCRIPT).filter(|name| !name.trim().is_empty())?;
    Some(if named.contains('/') { PathBuf::from(named) } else { Path::new(".").join(named) })
}

/// Where a pre-script runs.
pub struct Place<'a> {
    pub env: &'a Env,
    pub cwd: &'a Path,
    pub identity: &'a Identity,
}

/// Sources the script in a shell and returns the environment that it leaves, the working directory among it as `PWD`.
pub async fn source(script: &Path, place: Place<'_>, reaper: &Reaper) -> Result<Env, String> {
    let script = place.cwd.join(script);
    if let Err(error) = std::fs::File::open(&script) {
        return Err(format!("{} cannot be read: {error}", script.display()));
    }
    let agent = std::env::current_exe().map_err(|e| format!("the agent does not find itself: {e}"))?;
    let words = ["sh", "-c", SOURCE, &agent.to_string_lossy(), &script.to_string_lossy()];
    let argv = words.map(str::to_owned);
    let plain = |error: io::Error| error.to_string();
    let (out, write) = pipes::pipe().map_err(plain)?;
    let launch = Launch {
        argv: &argv,
        env: place.env,
        cwd: Some(place.cwd),
        identity: Some(place.identity),
        stdin: Some(pipes::empty_input().map_err(plain)?),
        stdout: Some(write),
        stderr: None,
    };
    let (_, exit) = reaper.spawn(launch).map_err(|e| e.to_string())?;
    let mut dump = Vec::new();
    while out.readable().await.is_ok() && dump.len() < MAX_DUMP {
        if matches!(pipes::try_read(&out, |bytes| dump.extend_from_slice(bytes)), Read::End) {
            break;
        }
    }
    match exit.await {
        Ok(Exit::Code(0)) if dump.ends_with(&[0]) => Ok(parse(&dump)),
        Ok(Exit::Code(code)) => Err(format!("{} ended with exit status {code}", script.display())),
        Ok(Exit::Signal { number, .. }) => Err(format!("{} was ended by signal {number}", script.display())),
        Err(_) => Err(format!("{} was lost track of", script.display())),
    }
}

/// Writes the environment of this process, each variable closed by a NUL.
pub fn dump(out: &mut impl io::Write) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let mut bytes = Vec::new();
    for (name, value) in std::env::vars_os() {
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(b'=');
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
    }
    out.write_all(&bytes)
}

fn parse(dump: &[u8]) -> Env {
    let pairs = dump.split(|byte| *byte == 0).filter_map(|pair| std::str::from_utf8(pair).ok());
    pairs
        .filter_map(|pair| pair.split_once('='))
        // The shell's own.
        .filter(|(name, _)| !name.is_empty() && !matches!(*name, "_" | "SHLVL" | "OLDPWD"))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn commands_in_their_other_spellings() {
        let env = |pairs: &[(&str, &str)]| -> Env {
            pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
        };
        let shell = ("BOOTSTRAP_SHELL", "/bin/zsh");
        let plain = words(&["python", "-c", "x"]);
        assert_eq!(command(plain.clone(), &env(&[shell])).unwrap(), plain);
        assert_eq!(
            command(words(&["-c", "echo", "a b"]), &env(&[shell])).unwrap(),
            words(&["/bin/zsh", "-c", "echo a b"])
        );
        let asked = env(&[shell, ("BOOTSTRAP_CMD", "make all")]);
        assert_eq!(command(plain, &asked).unwrap(), words(&["/bin/zsh", "-c", "make all"]));
        assert!(command(vec![], &env(&[])).unwrap().is_empty());
        assert!(command(words(&["-c", "x"]), &env(&[("PATH", "/nowhere")])).is_err());
    }

    #[test]
    fn scripts_are_found_from_the_working_directory() {
        let env = |name: &str| Env::from([(PRE_SCRIPT.to_owned(), name.to_owned())]);
        assert_eq!(pre_script(&env("x.sh")), Some("./x.sh".into()));
        assert_eq!(pre_script(&env("/a/x.sh")), Some("/a/x.sh".into()));
        assert_eq!(pre_script(&env(" ")), None);
    }

    #[test]
    fn what_a_shell_adds_for_itself_is_left_out() {
        let env = parse(b"A=b=c\0_=/bin/x\0SHLVL=1\0B=l1\nl2\0");
        assert_eq!(env, Env::from([("A".into(), "b=c".into()), ("B".into(), "l1\nl2".into())]));
    }
}
