//! The OpenAPI document, and a page that shows it without loading anything from elsewhere.

use std::sync::OnceLock;

use axum::{Json, response::Html};
use sandglass_api::openapi;
use serde_json::Value;

fn cached() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(openapi::document)
}

/// `GET /openapi.json`
pub async fn document() -> Json<&'static Value> {
    Json(cached())
}

/// `GET /docs`, `GET /redoc`
pub async fn page() -> Html<String> {
    static PAGE: OnceLock<String> = OnceLock::new();
    Html(PAGE.get_or_init(|| render(cached())).clone())
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}\
h2{margin-top:2rem;border-bottom:1px solid #d0d7de}details{border:1px solid #d0d7de;border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}\
summary{cursor:pointer}code,pre{font:13px/1.45 ui-monospace,monospace}pre{background:#f6f8fa;padding:.6rem;overflow:auto}\
.m{display:inline-block;width:4.5rem;font-weight:600}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn render(document: &Value) -> String {
    let text = |value: &Value| escape(value.as_str().unwrap_or_default());
    let mut groups: Vec<(String, String)> = Vec::new();
    for (path, item) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let tag = operation["tags"][0].as_str().unwrap_or("Other").to_owned();
            let detail = serde_json::to_string_pretty(operation).unwrap_or_default();
            let entry = format!(
                "<details><summary><span class=m>{}</span> <code>{}</code> — {}</summary><pre>{}</pre></details>",
                escape(&method.to_uppercase()),
                escape(path),
                text(&operation["summary"]),
                escape(&detail),
            );
            match groups.iter_mut().find(|(name, _)| *name == tag) {
                Some((_, body)) => body.push_str(&entry),
                None => groups.push((tag, entry)),
            }
        }
    }
    let body: String = groups.iter().map(|(tag, body)| format!("<h2>{}</h2>{body}", escape(tag))).collect();
    let schemas: String = document["components"]["schemas"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, schema)| {
            let shown = serde_json::to_string_pretty(schema).unwrap_or_default();
            format!(
                "<details><summary><code>{}</code></summary><pre>{}</pre></details>",
                escape(name),
                escape(&shown)
            )
        })
        .collect();
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}</title>\
         <style>{STYLE}</style><h1>{title}</h1><p>The document itself: <a href=/openapi.json>/openapi.json</a></p>{body}\
         <h2>Schemas</h2>{schemas}</html>",
        title = text(&document["info"]["title"]),
    )
}
