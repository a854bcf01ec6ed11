//! `sandglass-shim`: the process that holds a box. Started by the server, not by people.

use std::path::Path;

const USAGE: &str = "usage: sandglass-shim zygote        (control socket as standard input or descriptor 3)
       sandglass-shim run <dir>     (report channel as standard input or descriptor 3)
       sandglass-shim --version";

fn main() {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let words: Vec<Option<&str>> = arguments.iter().map(|argument| argument.to_str()).collect();
    let code = match words.as_slice() {
        [Some("zygote")] => sandglass_shim::zygote_main(),
        [Some("run"), _] => sandglass_shim::shim_main(Path::new(&arguments[1])),
        [Some("--version")] => {
            println!("sandglass-shim {}", env!("CARGO_PKG_VERSION"));
            0
        }
        _ => {
            eprintln!("{USAGE}");
            64
        }
    };
    std::process::exit(code);
}
