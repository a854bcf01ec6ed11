//! Numbers, printed; and that a swap leaves no window.
