use std::collections::BTreeSet;

use proptest::prelude::*;
use sandglass_sandbox::Timestamp;

use super::{admission::image, *};
use crate::{
    decide::{
        Rules,
        retention::{Why, Wish, plan},
    },
    image::Image,
};

fn images() -> impl Strategy<Value = Vec<Image>> {
    let one = (0_u8..3, 0_i64..1000, 0_i64..1000, 0_u8..6, 0_u64..3, any::<bool>(), 1_u64..500);
    prop::collection::vec(one, 0..24).prop_map(|all| {
        all.into_iter()
            .map(|(recipe, created, used, state, holders, tagged, size)| {
                let mut image = image(recipe, 1, created);
                image.last_used_at = Timestamp::clamped(used);
                image.holders = holders.saturating_sub(1);
                image.size_bytes = size;
                image.state =
                    ImageState::ALL.get(usize::from(state)).copied().unwrap_or(ImageState::Superseded);
                if tagged && image.usable() {
                    image.tags = vec!["t".parse().unwrap()];
                }
                image
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn retention_takes_only_what_may_go_and_all_that_must(
        images in images(), keep in 0_u32..4, budget in prop::option::of(0_u64..3000), fresh in any::<bool>(),
    ) {
        let rules = Rules { keep, budget_bytes: budget, ..Rules::default() };
        let pinned = image(0, 1, 0).lineage;
        let wishes = BTreeMap::from([(pinned.clone(), Wish { keep: None, fresh })]);
        let goes = plan(&images, &wishes, &rules);
        let gone: BTreeSet<_> = goes.iter().map(|(id, _)| *id).collect();
        prop_assert_eq!(gone.len(), goes.len(), "nothing goes twice");
        let newest = |image: &Image| images.iter().filter(|i| i.usable() && i.lineage == image.lineage)
            .max_by_key(|i| (i.created_at, i.id)).is_some_and(|i| i.id == image.id);
        let there = |i: &&Image| !matches!(i.state, ImageState::Deleting | ImageState::Deleted);
        for (id, why) in &goes {
            let image = images.iter().find(|i| i.id == *id).unwrap();
            prop_assert_eq!(image.holders, 0);
            prop_assert!(image.tags.is_empty() && there(&image));
            prop_assert_eq!(*why == Why::Unusable, !image.usable());
            if newest(image) {
                prop_assert_eq!(*why, Why::Budget);
                prop_assert!(!(fresh && image.lineage == pinned), "the prebuild's image goes");
                // Everything that is no lineage's newest, and could go, went before.
                let goes_or_stays = |i: &Image| {
                    gone.contains(&i.id) || newest(i) || i.holders > 0 || !i.tags.is_empty()
                };
                let others_went = images.iter().filter(there).all(goes_or_stays);
                prop_assert!(others_went);
            }
        }
        // What nobody may use and nobody uses goes.
        for image in images.iter().filter(there).filter(|i| !i.usable() && i.holders == 0) {
            prop_assert!(gone.contains(&image.id));
        }
        // No more others than are kept stay.
        for lineage in images.iter().map(|i| &i.lineage).collect::<BTreeSet<_>>() {
            let stay = images.iter().filter(|i| {
                i.lineage == *lineage && i.usable() && i.holders == 0 && i.tags.is_empty() && !newest(i)
                    && !gone.contains(&i.id)
            }).count();
            prop_assert!(stay <= keep as usize);
        }
        // The budget holds, unless only what must stay is left.
        if let Some(budget) = budget {
            let left: u64 = images.iter().filter(there).filter(|i| !gone.contains(&i.id)).map(|i| i.size_bytes).sum();
            let may_go = |i: &Image| i.holders == 0 && i.tags.is_empty() && !(fresh && newest(i) && i.lineage == pinned);
            prop_assert!(left <= budget || images.iter().filter(there).all(|i| gone.contains(&i.id) || !may_go(i)));
        }
        // Once it went, nothing more goes.
        let after: Vec<Image> = images.iter().filter(|i| !gone.contains(&i.id)).cloned().collect();
        prop_assert_eq!(plan(&after, &wishes, &rules), vec![]);
    }
}
