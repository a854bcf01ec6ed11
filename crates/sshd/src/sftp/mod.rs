pub fn serve() {}
