//! `execd seal`: what a build sandbox is asked for before its files become an image.
//!
//! Runs as a process of its own, so that what it meets can end or fill nothing but itself. It uses no program of the image.

mod processes;
mod search;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use sandglass_sandbox::sealing::{CLOCK, END, Found, SEARCH, Search, WORD};

/// Runs what the words name; `None` when they name something else.
pub fn run(args: &[String]) -> Option<ExitCode> {
    let (word, rest) = args.split_first()?;
    if word != WORD {
        return None;
    }
    let done = match rest {
        [what] if what == CLOCK => clock(),
        [what] if what == END => processes::end_others(),
        [what, task] if what == SEARCH => look(Path::new(task)),
        _ => Err(io::Error::other("`seal` takes `clock`, `end` or `search FILE`")),
    };
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The last line is what the server shows.
            let _ = writeln!(io::stdout(), "{error}");
            ExitCode::FAILURE
        }
    })
}

fn clock() -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?;
    writeln!(io::stdout(), "{}", now.as_nanos())
}

fn look(task: &Path) -> io::Result<()> {
    let read = std::fs::read(task);
    std::fs::remove_file(task)?;
    // Not the parser's own message, which would repeat what is there.
    let task: Search =
        serde_json::from_slice(&read?).map_err(|_| io::Error::other("what to look for is unreadable"))?;
    search::search(Path::new("/"), &task, &mut |found: &Found| {
        let mut line = serde_json::to_vec(found)?;
        line.push(b'\n');
        io::stdout().write_all(&line)
    })
}
