//! The rows, and every write as one function without awaits: all or nothing.

use std::collections::{BTreeMap, BTreeSet};

use sandglass_sandbox::{ImageBuildId, ImageId, PrebuildId, Timestamp};

use crate::{
    build::{ImageBuild, Slot},
    image::{Image, ImageState, Tag},
    key::TagName,
    ports::{Advance, Commit, Inserted, Negative, NegativeChange, NewImage},
    prebuild::Prebuild,
};

/// Everything that a store keeps.
#[derive(Debug, Default)]
pub struct Tables {
    pub builds: BTreeMap<ImageBuildId, ImageBuild>,
    pub images: BTreeMap<ImageId, Image>,
    pub holders: BTreeSet<(ImageId, String)>,
    pub tags: BTreeMap<(Option<String>, String, TagName), Tag>,
    pub negatives: BTreeMap<Slot, Negative>,
    pub prebuilds: BTreeMap<PrebuildId, Prebuild>,
    pub ordinals: BTreeMap<(String, String), u64>,
    /// Every state that every build was in, in order.
    pub history: Vec<(ImageBuildId, crate::build::BuildState)>,
}

impl Tables {
    pub(super) fn insert_build(&mut self, build: &ImageBuild) -> Inserted {
        let under_way = |row: &&ImageBuild| row.slot == build.slot && !row.state.terminal();
        if let Some(row) = self.builds.values().find(under_way) {
            return Inserted::InFlight(row.id);
        }
        if self.builds.contains_key(&build.id) {
            return Inserted::InFlight(build.id);
        }
        self.history.push((build.id, build.state));
        self.builds.insert(build.id, build.clone());
        Inserted::Written
    }

    pub(super) fn commit(&mut self, commit: &Commit<'_>) -> Advance {
        let current = self.builds.get(&commit.build.id);
        let Some(current) = current.filter(|row| row.version == commit.expected) else {
            return Advance::Lost;
        };
        if current.state != commit.build.state {
            // What the store does not check in production, the tests do.
            assert!(current.state.may_become(commit.build.state), "an illegal transition was written");
            self.history.push((commit.build.id, commit.build.state));
        }
        assert_eq!(commit.build.version, commit.expected + 1, "versions grow by one");
        self.builds.insert(commit.build.id, commit.build.clone());
        match commit.negative {
            Some(NegativeChange::Remember(negative)) => {
                self.negatives.insert(negative.slot.clone(), negative.clone());
            }
            Some(NegativeChange::Forget) => {
                self.negatives.remove(&commit.build.slot);
            }
            None => {}
        }
        if let Some(new) = commit.image {
            self.insert_image(new);
        }
        Advance::Written
    }

    fn insert_image(&mut self, new: &NewImage) {
        let id = new.image.id;
        self.images.insert(id, new.image.clone());
        self.holders.extend(new.holders.iter().map(|holder| (id, holder.clone())));
        for tag in &new.tags {
            self.put_tag(tag);
        }
        for old in &new.supersedes {
            if let Some(old) = self.images.get_mut(old).filter(|old| old.state == ImageState::Ready) {
                old.state = ImageState::Superseded;
                old.version += 1;
            }
        }
        self.recount(id);
    }

    fn put_tag(&mut self, tag: &Tag) {
        let key = (tag.namespace.clone(), tag.repository_key.clone(), tag.name.clone());
        if let Some(before) = self.tags.insert(key, tag.clone()) {
            self.recount(before.image);
        }
        self.recount(tag.image);
    }

    fn recount(&mut self, id: ImageId) {
        let holders = self.holders.iter().filter(|(image, _)| *image == id).count() as u64;
        let tags = self.tags.values().filter(|tag| tag.image == id).map(|tag| tag.name.clone()).collect();
        if let Some(image) = self.images.get_mut(&id) {
            image.holders = holders;
            image.tags = tags;
        }
    }

    pub(super) fn advance_image(&mut self, expected: u64, next: &Image) -> Advance {
        let Some(current) = self.images.get(&next.id).filter(|row| row.version == expected) else {
            return Advance::Lost;
        };
        if current.state != next.state {
            assert!(current.state.may_become(next.state), "an illegal transition was written");
        }
        let (holders, tags) = (current.holders, current.tags.clone());
        self.images.insert(next.id, Image { holders, tags, ..next.clone() });
        if next.state == ImageState::Deleting {
            self.tags.retain(|_, tag| tag.image != next.id);
            self.recount(next.id);
        }
        Advance::Written
    }

    pub(super) fn acquire(&mut self, id: ImageId, holder: &str, at: Timestamp) -> Advance {
        let Some(image) = self.images.get_mut(&id).filter(|image| image.usable()) else {
            return Advance::Lost;
        };
        image.version += 1;
        image.last_used_at = image.last_used_at.max(at);
        self.holders.insert((id, holder.to_owned()));
        self.recount(id);
        Advance::Written
    }

    pub(super) fn release(&mut self, id: ImageId, holder: &str, at: Timestamp) {
        if self.holders.remove(&(id, holder.to_owned())) {
            if let Some(image) = self.images.get_mut(&id) {
                image.version += 1;
                image.last_used_at = image.last_used_at.max(at);
            }
            self.recount(id);
        }
    }

    pub(super) fn move_tag(&mut self, tag: &Tag) -> Advance {
        let Some(image) = self.images.get_mut(&tag.image).filter(|image| image.usable()) else {
            return Advance::Lost;
        };
        image.version += 1;
        self.put_tag(tag);
        Advance::Written
    }
}
