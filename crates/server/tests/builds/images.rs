//! Images that builds made, over HTTP.

use serde_json::{Value, json};

use super::harness::Stage;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_are_listed_named_and_removed() {
    let stage = Stage::new().await;
    stage.commit(&[("README", "x")]);
    let asked = json!({"repository": {"url": stage.url()}, "tag": "latest"});
    let built = stage.call("POST", "/v1/image-builds", asked).await.json();
    let built = stage.ended(built["id"].as_str().unwrap()).await;
    assert_eq!(
        (&built["status"]["state"], &built["recipe"]),
        (&json!("Succeeded"), &json!("none")),
        "{built}"
    );
    let id = built["imageId"].as_str().unwrap();
    let listed = stage.get("/v1/images?kind=built").await.json();
    let image = &listed["items"][0];
    assert_eq!(
        (&image["id"], &image["tags"], &image["state"]),
        (&json!(id), &json!(["latest"]), &json!("Ready"))
    );
    assert_eq!(image["commits"]["/workspace/web"], built["repository"]["commit"]);
    assert_eq!(listed["pagination"]["totalItems"], 1, "{listed}");

    let key = image["repositoryKey"].as_str().unwrap().replace('/', "%2F");
    let path = format!("/v1/images/tags/{key}/stable");
    let tagged = stage.call("PUT", &path, json!({"imageId": id})).await;
    assert_eq!(
        (tagged.status, &tagged.json()["tags"]),
        (200, &json!(["latest", "stable"])),
        "{}",
        tagged.text
    );
    assert_eq!(stage.call("PUT", "/v1/images/tags/other/stable", json!({"imageId": id})).await.status, 404);

    let held = stage.builds.driver();
    held.acquire(id.parse().unwrap(), "somebody").await.unwrap();
    let path = format!("/v1/images/{id}");
    let refused = stage.call("DELETE", &path, Value::Null).await;
    assert_eq!((refused.status, refused.code()), (409, "IMAGE::IN_USE".into()));
    assert_eq!(stage.call("DELETE", &format!("{path}?force=true"), Value::Null).await.status, 202);
    assert_eq!(stage.images.made().len(), 1, "it is in use");
    held.release(id.parse().unwrap(), "somebody").await.unwrap();
    stage.when("the image is removed", |stage| stage.images.made().is_empty()).await;
    stage.until(&path, |image| image["state"] == "Deleted").await;
    assert_eq!(stage.get("/v1/images?kind=built").await.json()["items"], json!([]));
    // The local images of the embedded runtime are where they were; this runtime has none.
    assert_eq!(stage.get("/v1/images").await.status, 501);
    assert_eq!(stage.call("DELETE", "/v1/images/busybox", Value::Null).await.status, 501);
}
