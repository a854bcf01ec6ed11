//! Tests of the server library against fakes: no kernel, no root, no waiting.

mod engine;
