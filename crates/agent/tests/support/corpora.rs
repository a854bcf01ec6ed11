//! What the fuzzer was started from and has found so far, once more.

use std::fs;
use std::path::Path;

#[path = "../../../../fuzz/properties.rs"]
mod properties;

#[test]
fn every_input_of_the_corpora_keeps_its_property() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (name, property) in properties::ALL {
        let inputs: Vec<_> = fs::read_dir(corpora.join(name)).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{name} has no corpus");
        for input in inputs {
            println!("{}", input.display());
            property(&fs::read(input).unwrap());
        }
    }
}
