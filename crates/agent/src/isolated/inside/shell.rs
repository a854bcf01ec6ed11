//! The text that turns a shell into the session's: one loop around named pipes.
//!
//! Nothing of a run travels through the shell's own descriptors: orders come through `next`, facts go out through
//! `said`, and each run has a script and an output of its own. So user code can read its standard input, print
//! whatever it likes and close every descriptor without getting between the session and its agent.
//!
//! Before each foreground run a copy of the shell is set aside, as a child of the session's init. When the run ends
//! the shell (`exit`, `set -e`, an interpreter's `kill -9 $$`, a stop by force), the copy becomes the session's shell:
//! the session is then as it was before that run.

/// `$1` is the directory of the pipes, `$2` the loop. No function, in which `declare` would make variables local.
pub(super) const DRIVER: &str = "__execd_at=$1 __execd_loop=$2; shift 2; eval \"$__execd_loop\"";

/// Works in bash, dash and busybox.
pub(super) const LOOP: &str = r#"
while IFS=' ' command read -r __execd_run __execd_how < "$__execd_at/next"; do
  case $__execd_how in
  background)
    ( ( ( . "$__execd_at/$__execd_run" ) </dev/null >"$__execd_at/$__execd_run.out" 2>&1
        command echo "ended $__execd_run $?" > "$__execd_at/said" ) &
      command echo "away $__execd_run $!" > "$__execd_at/said" )
    ;;
  *)
    ( ( trap - INT QUIT 2>/dev/null
        IFS= command read -r __execd_how < "$__execd_at/$__execd_run.spare" && [ "$__execd_how" = go ] || exit 0
        eval "$__execd_loop" ) &
      command echo "spare $__execd_run $!" > "$__execd_at/said" )
    if [ "$__execd_how" = copy ]; then
      ( . "$__execd_at/$__execd_run" ) </dev/null >"$__execd_at/$__execd_run.out" 2>&1
    else
      . "$__execd_at/$__execd_run" </dev/null >"$__execd_at/$__execd_run.out" 2>&1
    fi
    command echo "ended $__execd_run $?" > "$__execd_at/said"
    ;;
  esac
done
"#;
