//! The file transfer program on the standard input and output, as the user that it is started as.

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match sandglass_sshd::sftp::serve_standard_streams() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "sftp-server: {error}");
            ExitCode::FAILURE
        }
    }
}
