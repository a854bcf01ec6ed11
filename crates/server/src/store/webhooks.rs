//! Rows of webhooks and of their deliveries, and the implementation of their port.

use async_trait::async_trait;
use sandglass_sandbox::{Timestamp, WebhookId, ports::store::StoreError};
use sandglass_webhooks::{Claim, Delivery, DeliveryState, Fenced, Health, Webhook, WebhookStore};

use super::{
    database::{Session, values, within},
    image_builds::{body, read, readable},
    sql_store::SqlStore,
};

/// What has not ended sorts after everything.
const NOT_FINISHED: i64 = i64::MAX;

fn fenced(written: u64) -> Fenced {
    if written == 1 { Fenced::Written } else { Fenced::Lost }
}

fn finished(delivery: &Delivery) -> i64 {
    delivery.finished_at.map_or(NOT_FINISHED, Timestamp::as_millis)
}

fn pair((webhook, health): (String, String)) -> Result<(Webhook, Health), StoreError> {
    Ok((read("a webhook", &webhook)?, read("what is known of a receiver", &health)?))
}

async fn write(on: &mut Session, id: WebhookId, delivery: &Delivery) -> Result<u64, StoreError> {
    on.execute(
        "UPDATE webhook_deliveries SET state = $1, finished_ms = $2, body = $3 \
         WHERE webhook_id = $4 AND seq = $5 AND state = 'Pending'",
        values![delivery.state.word(), finished(delivery), body(delivery), id.to_string(), delivery.seq],
    )
    .await
}

async fn pending(on: &mut Session, id: WebhookId) -> Result<Vec<Delivery>, StoreError> {
    let rows = on
        .rows(
            "SELECT body FROM webhook_deliveries WHERE webhook_id = $1 AND state = 'Pending' ORDER BY seq",
            values![id.to_string()],
        )
        .await?;
    Ok(readable("a delivery", rows))
}

#[async_trait]
impl WebhookStore for SqlStore {
    async fn insert_webhook(&self, webhook: &Webhook, cursor: u64) -> Result<(), StoreError> {
        within(self.limit, async {
            let mut on = self.database.writer().await?;
            on.execute(
                "INSERT INTO webhooks (id, version, read_to, lease_owner, lease_until_ms, health, created_ms, body) \
                 VALUES ($1, $2, $3, '', 0, $4, $5, $6)",
                values![
                    webhook.id.to_string(),
                    webhook.version,
                    cursor,
                    body(&Health::default()),
                    webhook.created_at.as_millis(),
                    body(webhook),
                ],
            )
            .await
            .map(drop)
        })
        .await
    }

    async fn replace_webhook(
        &self,
        expected: u64,
        webhook: &Webhook,
        cursor: Option<u64>,
    ) -> Result<Fenced, StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            let written = tx
                .execute(
                    "UPDATE webhooks SET version = $1, body = $2 WHERE id = $3 AND version = $4",
                    values![webhook.version, body(webhook), webhook.id.to_string(), expected],
                )
                .await?;
            if written == 1
                && let Some(cursor) = cursor
            {
                tx.execute(
                    "UPDATE webhooks SET read_to = $1, health = $2 WHERE id = $3",
                    values![cursor, body(&Health::default()), webhook.id.to_string()],
                )
                .await?;
            }
            tx.commit().await?;
            Ok(fenced(written))
        })
        .await
    }

    async fn delete_webhook(&self, id: WebhookId) -> Result<(), StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            tx.execute("DELETE FROM webhooks WHERE id = $1", values![id.to_string()]).await?;
            tx.execute("DELETE FROM webhook_deliveries WHERE webhook_id = $1", values![id.to_string()])
                .await?;
            tx.commit().await
        })
        .await
    }

    async fn webhook(&self, id: WebhookId) -> Result<Option<(Webhook, Health)>, StoreError> {
        within(self.limit, async {
            let mut on = self.database.reader().await?;
            let row =
                on.row("SELECT body, health FROM webhooks WHERE id = $1", values![id.to_string()]).await?;
            row.map(pair).transpose()
        })
        .await
    }

    async fn webhooks(&self) -> Result<Vec<(Webhook, Health)>, StoreError> {
        within(self.limit, async {
            let mut on = self.database.reader().await?;
            let rows: Vec<(String, String)> = on
                .rows("SELECT body, health FROM webhooks ORDER BY created_ms DESC, id DESC", values![])
                .await?;
            // A row that a newer server wrote must not silence all others.
            let kept = rows.into_iter().filter_map(|row| {
                pair(row).inspect_err(|error| tracing::warn!(%error, "a row is left out")).ok()
            });
            Ok(kept.collect())
        })
        .await
    }

    async fn claim(&self, id: WebhookId, claim: Claim<'_>) -> Result<Option<u64>, StoreError> {
        within(self.limit, async {
            let mut on = self.database.writer().await?;
            let row: Option<(i64,)> = on
                .row(
                    "UPDATE webhooks SET lease_owner = $1, lease_until_ms = $2 \
                     WHERE id = $3 AND (lease_owner = $1 OR lease_until_ms <= $4) RETURNING read_to",
                    values![claim.owner, claim.until.as_millis(), id.to_string(), claim.now.as_millis()],
                )
                .await?;
            Ok(row.map(|(read_to,)| u64::try_from(read_to).unwrap_or(0)))
        })
        .await
    }

    async fn release(&self, id: WebhookId, owner: &str) -> Result<(), StoreError> {
        within(self.limit, async {
            let mut on = self.database.writer().await?;
            on.execute(
                "UPDATE webhooks SET lease_owner = '', lease_until_ms = 0 WHERE id = $1 AND lease_owner = $2",
                values![id.to_string(), owner],
            )
            .await
            .map(drop)
        })
        .await
    }

    async fn enqueue(
        &self,
        (id, version): (WebhookId, u64),
        owner: &str,
        (expected, cursor): (u64, u64),
        deliveries: &[Delivery],
    ) -> Result<Fenced, StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            let moved = tx
                .execute(
                    "UPDATE webhooks SET read_to = $1 \
                     WHERE id = $2 AND version = $3 AND lease_owner = $4 AND read_to = $5",
                    values![cursor, id.to_string(), version, owner, expected],
                )
                .await?;
            if moved != 1 {
                return Ok(Fenced::Lost);
            }
            for delivery in deliveries {
                tx.execute(
                    "INSERT INTO webhook_deliveries (webhook_id, seq, state, finished_ms, body) \
                     VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
                    values![
                        id.to_string(),
                        delivery.seq,
                        delivery.state.word(),
                        finished(delivery),
                        body(delivery)
                    ],
                )
                .await?;
            }
            tx.commit().await?;
            Ok(Fenced::Written)
        })
        .await
    }

    async fn record(
        &self,
        id: WebhookId,
        owner: &str,
        delivery: &Delivery,
        health: &Health,
    ) -> Result<Fenced, StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            let held = tx
                .execute(
                    "UPDATE webhooks SET health = $1 WHERE id = $2 AND lease_owner = $3",
                    values![body(health), id.to_string(), owner],
                )
                .await?;
            if held != 1 || write(&mut tx, id, delivery).await? != 1 {
                return Ok(Fenced::Lost);
            }
            tx.commit().await?;
            Ok(Fenced::Written)
        })
        .await
    }

    async fn abandon(&self, id: WebhookId, now: Timestamp) -> Result<u64, StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            let mut abandoned = 0;
            for mut delivery in pending(&mut tx, id).await? {
                delivery.finish(DeliveryState::Dead, now);
                abandoned += write(&mut tx, id, &delivery).await?;
            }
            tx.commit().await?;
            Ok(abandoned)
        })
        .await
    }

    async fn pending(&self, id: WebhookId) -> Result<Vec<Delivery>, StoreError> {
        within(self.limit, async { pending(&mut self.database.reader().await?, id).await }).await
    }

    async fn deliveries(
        &self,
        id: WebhookId,
        state: Option<&str>,
        limit: u32,
    ) -> Result<Vec<Delivery>, StoreError> {
        within(self.limit, async {
            let mut on = self.database.reader().await?;
            let rows = on
                .rows(
                    "SELECT body FROM webhook_deliveries WHERE webhook_id = $1 AND ($2 IS NULL OR state = $2) \
                     ORDER BY seq DESC LIMIT $3",
                    values![id.to_string(), state, i64::from(limit)],
                )
                .await?;
            Ok(readable("a delivery", rows))
        })
        .await
    }

    async fn prune_deliveries(&self, before: Timestamp, keep: u32) -> Result<u64, StoreError> {
        within(self.limit, async {
            let mut on = self.database.writer().await?;
            let mut gone = on
                .execute(
                    "DELETE FROM webhook_deliveries WHERE state <> 'Pending' AND finished_ms < $1",
                    values![before.as_millis()],
                )
                .await?;
            let ids: Vec<(String,)> = on.rows("SELECT id FROM webhooks", values![]).await?;
            for (id,) in ids {
                let last: Option<(i64,)> = on
                    .row(
                        "SELECT seq FROM webhook_deliveries WHERE webhook_id = $1 AND state <> 'Pending' \
                         ORDER BY seq DESC LIMIT 1 OFFSET $2",
                        values![id.as_str(), i64::from(keep)],
                    )
                    .await?;
                if let Some((last,)) = last {
                    gone += on
                        .execute(
                            "DELETE FROM webhook_deliveries WHERE webhook_id = $1 AND state <> 'Pending' AND seq <= $2",
                            values![id, last],
                        )
                        .await?;
                }
            }
            Ok(gone)
        })
        .await
    }
}
