//! `sandglass-egress`: started beside a sandbox, by the shim or as a container. Without arguments it supervises; it is told everything else by
//! its environment.

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    let code = match words.as_slice() {
        [] => sandglass_egress::supervisor::run(),
        ["worker", handed @ ..] => sandglass_egress::worker::run(handed),
        ["--version"] => {
            println!("sandglass-egress {}", env!("CARGO_PKG_VERSION"));
            0
        }
        _ => {
            eprintln!("usage: sandglass-egress [--version]");
            64
        }
    };
    std::process::exit(code);
}
