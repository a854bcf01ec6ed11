//! Buckets as volumes. Names end up in paths and in the mounting program's files and arguments, so their letters are few.

use sandglass_api::lifecycle::OssfsVolume;
use sandglass_sandbox::spec::ObjectStoreKey;

use crate::http::error::{ApiError, ApiResult, Code};

/// What is mounted, apart from the key.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    pub(super) bucket: String,
    pub(super) endpoint: String,
    pub(super) version: u8,
    pub(super) options: Vec<String>,
}

/// Checks and converts.
pub(super) fn check(asked: &OssfsVolume) -> ApiResult<(Bucket, ObjectStoreKey)> {
    let options = asked.options.clone().unwrap_or_default();
    if options.iter().any(|option| option.trim().is_empty() || option.trim_start().starts_with('-')) {
        let message = "an ossfs option must not be blank or start with '-'";
        return Err(ApiError::new(Code::VolumeOssfsOption, message));
    }
    if !is_bucket(&asked.bucket) {
        return Err(ApiError::invalid_parameter(
            "ossfs.bucket must be letters, digits, '-', '_' and '.', and begin and end with a letter or digit",
        ));
    }
    if !is_endpoint(&asked.endpoint) {
        return Err(ApiError::invalid_parameter(
            "ossfs.endpoint must be a host name, with scheme and port if need be",
        ));
    }
    if !options.iter().all(|option| is_option(option)) {
        return Err(ApiError::invalid_parameter(
            "an ossfs option must be `name` or `name=value` without blanks, commas, quotes and paths of the host",
        ));
    }
    let key = ObjectStoreKey {
        id: asked.access_key_id.clone().unwrap_or_default(),
        secret: asked.access_key_secret.clone().unwrap_or_default(),
    };
    // The key file has one line, `bucket:id:secret`.
    if ![&key.id, &key.secret].into_iter().all(|text| is_plain(text) && !text.contains(':')) {
        let message = "an ossfs access key must be visible ASCII without ':'";
        return Err(ApiError::new(Code::VolumeOssfsCredentials, message));
    }
    let bucket = Bucket {
        bucket: asked.bucket.clone(),
        endpoint: asked.endpoint.clone(),
        version: if asked.version == "1.0" { 1 } else { 2 },
        options,
    };
    Ok((bucket, key))
}

fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic())
}

fn is_bucket(text: &str) -> bool {
    let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && edge(text.bytes().next())
        && edge(text.bytes().last())
}

fn is_endpoint(text: &str) -> bool {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
    let host = host.strip_suffix('/').unwrap_or(host);
    let (name, port) = host.split_once(':').unwrap_or((host, "1"));
    name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'))
        && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// A value that is a path would make the mounting program, which is root on the host, read or write there.
fn is_option(text: &str) -> bool {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        && value.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b',' | b'"' | b'\'' | b'\\' | b'#'))
        && !value.starts_with(['/', '~'])
        && !value.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(change: impl FnOnce(&mut OssfsVolume)) -> &'static str {
        let mut asked = OssfsVolume {
            bucket: "my-bucket".to_owned(),
            endpoint: "oss-cn-hangzhou.aliyuncs.com".to_owned(),
            version: "2.0".to_owned(),
            options: None,
            access_key_id: Some("id".to_owned()),
            access_key_secret: Some("se/cr+et=".to_owned()),
        };
        change(&mut asked);
        check(&asked).map_or_else(|error| error.code, |_| "ok")
    }

    #[test]
    fn letters_are_few() {
        assert_eq!(code(|_| {}), "ok");
        let parameter = "SANDBOX::INVALID_PARAMETER";
        for bucket in ["../etc", "a/b", "..", "a b", "a\nb", "a:b", "-ab", "ab-", ".ab"] {
            assert_eq!(code(|v| v.bucket = bucket.into()), parameter, "{bucket}");
        }
        for (endpoint, expected) in [
            ("http://127.0.0.1:9000", "ok"),
            ("https://oss.example/", "ok"),
            ("oss.example:0", parameter),
            ("oss.example/path", parameter),
            ("user@oss.example", parameter),
            ("-o", parameter),
            ("a b", parameter),
            ("a\nb", parameter),
            ("ftp://a", parameter),
        ] {
            assert_eq!(code(|v| v.endpoint = endpoint.into()), expected, "{endpoint}");
        }
        for (option, expected) in [
            ("allow_other", "ok"),
            ("umask=022", "ok"),
            ("max-stat-cache-size=0", "ok"),
            ("", "VOLUME::INVALID_OSSFS_OPTION"),
            ("  ", "VOLUME::INVALID_OSSFS_OPTION"),
            ("-o", "VOLUME::INVALID_OSSFS_OPTION"),
            (" --x", "VOLUME::INVALID_OSSFS_OPTION"),
            ("a,b", parameter),
            ("a b", parameter),
            ("a\nb", parameter),
            ("use_cache=/etc", parameter),
            ("x=a/../b", parameter),
            ("=x", parameter),
        ] {
            assert_eq!(code(|v| v.options = Some(vec![option.into()])), expected, "{option}");
        }
        for key in ["a b", "a:b", "a\nb", "", "é"] {
            let seen = code(|v| v.access_key_secret = Some(key.into()));
            assert_eq!(seen, "VOLUME::INVALID_OSSFS_CREDENTIALS", "{key}");
        }
    }

    #[test]
    fn the_version_is_a_number() {
        let mut asked = OssfsVolume {
            bucket: "abc".to_owned(),
            endpoint: "e".to_owned(),
            version: "1.0".to_owned(),
            options: Some(vec!["ro".to_owned()]),
            access_key_id: Some("i".to_owned()),
            access_key_secret: Some("s".to_owned()),
        };
        assert_eq!(check(&asked).unwrap().0.version, 1);
        asked.version = "2.0".to_owned();
        let (bucket, key) = check(&asked).unwrap();
        assert_eq!((bucket.version, bucket.options), (2, vec!["ro".to_owned()]));
        assert_eq!(key, ObjectStoreKey { id: "i".to_owned(), secret: "s".to_owned() });
    }
}
