//! Which images go: what nobody uses or named, beyond the newest and a few, or beyond what all may take.

use std::collections::{BTreeMap, BTreeSet};

use sandglass_sandbox::{ImageId, Timestamp};

use super::Rules;
use crate::{
    build::ImageBuild,
    image::{Image, ImageState, Lineage},
    time::since,
};

/// What prebuilds want of a lineage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wish {
    /// Images to keep besides the newest, instead of what the rules say.
    pub keep: Option<u32>,
    /// The newest one stays whatever space there is.
    pub fresh: bool,
}

/// Why an image goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    /// Blocked or quarantined, and nobody uses it any more.
    Unusable,
    /// More than are kept of its lineage.
    Surplus,
    /// All images together take more than they may.
    Budget,
}

/// Decides. Nothing that is held or tagged goes. The newest usable image of a lineage goes only for the budget, as the last of all: else
/// every recipe that was ever built would keep its space for good.
pub fn plan(images: &[Image], wishes: &BTreeMap<Lineage, Wish>, rules: &Rules) -> Vec<(ImageId, Why)> {
    let mut goes: Vec<(ImageId, Why)> = Vec::new();
    let mut lineages: BTreeMap<&Lineage, Vec<&Image>> = BTreeMap::new();
    for image in images {
        match image.state {
            ImageState::Deleting | ImageState::Deleted => {}
            _ if image.usable() => lineages.entry(&image.lineage).or_default().push(image),
            _ if image.holders == 0 => goes.push((image.id, Why::Unusable)),
            _ => {}
        }
    }
    let mut spare: Vec<&Image> = Vec::new();
    let mut newest_ones: Vec<&Image> = Vec::new();
    for (lineage, mut members) in lineages {
        members.sort_by_key(|image| std::cmp::Reverse((image.created_at, image.id)));
        let wish = wishes.get(lineage).copied().unwrap_or_default();
        if let Some(newest) = members.first().filter(|image| free(image) && !wish.fresh) {
            newest_ones.push(newest);
        }
        let mut others: Vec<&Image> = members.into_iter().skip(1).filter(|image| free(image)).collect();
        others.sort_by_key(|image| std::cmp::Reverse((image.last_used_at, image.id)));
        let keep = wish.keep.unwrap_or(rules.keep) as usize;
        goes.extend(others.iter().skip(keep).map(|image| (image.id, Why::Surplus)));
        spare.extend(others.into_iter().take(keep));
    }
    if let Some(budget) = rules.budget_bytes {
        shrink(images, budget, spare, newest_ones, &mut goes);
    }
    goes
}

fn free(image: &Image) -> bool {
    image.holders == 0 && image.tags.is_empty()
}

fn shrink(
    images: &[Image],
    budget: u64,
    mut spare: Vec<&Image>,
    mut newest_ones: Vec<&Image>,
    goes: &mut Vec<(ImageId, Why)>,
) {
    let gone: BTreeSet<ImageId> = goes.iter().map(|(id, _)| *id).collect();
    let stays = |image: &&Image| {
        !gone.contains(&image.id) && !matches!(image.state, ImageState::Deleting | ImageState::Deleted)
    };
    let mut taken: u64 =
        images.iter().filter(stays).fold(0, |sum, image| sum.saturating_add(image.size_bytes));
    spare.sort_by_key(|image| (image.last_used_at, image.id));
    newest_ones.sort_by_key(|image| (image.last_used_at, image.id));
    for image in spare.into_iter().chain(newest_ones) {
        if taken <= budget {
            return;
        }
        taken = taken.saturating_sub(image.size_bytes);
        goes.push((image.id, Why::Budget));
    }
}

/// Whether the row and log of an ended build go: it owes nothing, is old enough, has no image that still exists, and no prebuild points at it.
pub fn forgettable(
    row: &ImageBuild,
    has_image: bool,
    pointed_at: bool,
    rules: &Rules,
    now: Timestamp,
) -> bool {
    let old = row.finished_at.is_some_and(|at| since(now, at) >= rules.ended_kept);
    row.state.terminal() && row.obligations.is_empty() && old && !has_image && !pointed_at
}
