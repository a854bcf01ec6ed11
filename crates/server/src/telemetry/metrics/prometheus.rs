//! The text format that Prometheus scrapes (version 0.0.4).
//!
//! Names follow OpenTelemetry's rules for Prometheus: dots become underscores, the unit is spelt out, counters end in
//! `_total`.

use std::fmt::Write as _;

use super::{
    family::{Family, Label, Labels, Points},
    sharded::Distribution,
};

/// What the page says it is.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The whole page.
pub fn page(families: &[Family]) -> String {
    let mut page = String::with_capacity(16 * 1024);
    for family in families {
        write(&mut page, family);
    }
    page
}

fn write(page: &mut String, family: &Family) {
    let mut name = underscored(family.name);
    if family.unit == "ms" {
        name.push_str("_milliseconds");
    }
    let kind = match family.points {
        Points::Counter(_) => {
            name.push_str("_total");
            "counter"
        }
        Points::Gauge(_) => "gauge",
        Points::Histogram { .. } => "histogram",
    };
    let _infallible = writeln!(page, "# HELP {name} {}\n# TYPE {name} {kind}", family.about);
    match &family.points {
        Points::Counter(points) => {
            points.iter().for_each(|(labels, value)| line(page, &name, labels, None, value));
        }
        Points::Gauge(points) => {
            points.iter().for_each(|(labels, value)| line(page, &name, labels, None, value));
        }
        Points::Histogram { bounds, points } => {
            points.iter().for_each(|(labels, read)| histogram(page, &name, bounds, labels, read));
        }
    }
}

fn histogram(page: &mut String, name: &str, bounds: &[u32], labels: &Labels, read: &Distribution) {
    let bucket = format!("{name}_bucket");
    let mut below = 0;
    for (bound, count) in bounds.iter().zip(&read.buckets) {
        below += count;
        line(page, &bucket, labels, Some(&bound.to_string()), &below);
    }
    line(page, &bucket, labels, Some("+Inf"), &read.count());
    line(page, &format!("{name}_sum"), labels, None, &read.sum_ms);
    line(page, &format!("{name}_count"), labels, None, &read.count());
}

fn line(page: &mut String, name: &str, labels: &Labels, bound: Option<&str>, value: &dyn std::fmt::Display) {
    page.push_str(name);
    let mut opened = false;
    let mut label = |page: &mut String, name: &str, value: &str| {
        page.push(if opened { ',' } else { '{' });
        opened = true;
        let _infallible = write!(page, "{}=\"{}\"", underscored(name), escaped(value));
    };
    for (name, value) in labels {
        match value {
            Label::Text(text) => label(page, name, text),
            Label::Int(number) => label(page, name, &number.to_string()),
            Label::Flag(flag) => label(page, name, if *flag { "true" } else { "false" }),
        }
    }
    if let Some(bound) = bound {
        label(page, "le", bound);
    }
    if opened {
        page.push('}');
    }
    let _infallible = writeln!(page, " {value}");
}

fn underscored(name: &str) -> String {
    name.replace('.', "_")
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_what_prometheus_reads() {
        let read = Distribution { buckets: vec![1, 2, 3], sum_ms: 12.5 };
        let families = [
            Family::counter("a.b", "Things.", vec![(vec![("x.y", "q\"\\\n".into())], 7)]),
            Family::gauge("g", "Now.", vec![(vec![], -1)]),
            Family::durations("d.t", "Times.", &[1, 5], vec![(vec![("ok", true.into())], read)]),
        ];
        let expected = "\
# HELP a_b_total Things.
# TYPE a_b_total counter
a_b_total{x_y=\"q\\\"\\\\\\n\"} 7
# HELP g Now.
# TYPE g gauge
g -1
# HELP d_t_milliseconds Times.
# TYPE d_t_milliseconds histogram
d_t_milliseconds_bucket{ok=\"true\",le=\"1\"} 1
d_t_milliseconds_bucket{ok=\"true\",le=\"5\"} 3
d_t_milliseconds_bucket{ok=\"true\",le=\"+Inf\"} 6
d_t_milliseconds_sum{ok=\"true\"} 12.5
d_t_milliseconds_count{ok=\"true\"} 6
";
        assert_eq!(page(&families), expected);
    }
}
