//! Whether a request gets an image, joins a build, begins one, or is refused.

use sandglass_sandbox::{ImageBuildId, Timestamp};

use crate::{
    build::ImageBuild,
    image::Image,
    key::BuildKey,
    ports::Negative,
    submission::{Fit, Match, Policy, Refusal},
};

/// What of a request matters here.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    pub policy: Policy,
    pub fit: Match,
    pub force: bool,
    pub key: &'a BuildKey,
    pub platform: &'a str,
}

/// What is known when the request comes.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// Images of the request's lineage.
    pub lineage: Vec<Image>,
    /// The image that the request's tag names.
    pub tagged: Option<Image>,
    pub in_flight: Option<ImageBuild>,
    pub negative: Option<Negative>,
}

/// What to do with a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    Use {
        image: Box<Image>,
        fit: Fit,
        /// Build the commit that was asked for meanwhile.
        refresh: bool,
    },
    Join(ImageBuildId),
    /// The build of the key is being cancelled; decide again when it ended.
    After(ImageBuildId),
    Start,
    WithoutImage,
    Refuse(Refusal),
}

/// Decides. A tag goes before the recipe, an exact image before a compatible one, a newer before an older one.
pub fn admit(ask: Ask<'_>, facts: &Facts, now: Timestamp) -> Admission {
    let builds = matches!(ask.policy, Policy::IfMissing | Policy::Always);
    let anew = ask.force || ask.policy == Policy::Always;
    if (!anew || !builds)
        && let Some((image, fit)) = fitting(ask, facts)
    {
        let behind = fit == Fit::Compatible && builds && facts.in_flight.is_none();
        let refresh = behind && refused(facts, now).is_none();
        return Admission::Use { image: Box::new(image.clone()), fit, refresh };
    }
    match ask.policy {
        Policy::Never => return Admission::WithoutImage,
        Policy::RequireCached => return Admission::Refuse(Refusal::NotCached),
        Policy::IfMissing | Policy::Always => {}
    }
    match &facts.in_flight {
        Some(build) if build.cancel.is_some() => Admission::After(build.id),
        Some(build) => Admission::Join(build.id),
        None => match refused(facts, now) {
            Some(refusal) if !ask.force => Admission::Refuse(refusal),
            _ => Admission::Start,
        },
    }
}

fn fitting<'f>(ask: Ask<'_>, facts: &'f Facts) -> Option<(&'f Image, Fit)> {
    let usable = |image: &&Image| image.usable() && image.platform == ask.platform;
    let compatible = ask.fit == Match::Compatible;
    let tagged = facts.tagged.iter().find(usable).filter(|image| compatible || image.key == *ask.key);
    if let Some(image) = tagged {
        return Some((image, Fit::Tagged));
    }
    let newest = |exact: bool| {
        let fits = |image: &&Image| !exact || image.key == *ask.key;
        facts.lineage.iter().filter(usable).filter(fits).max_by_key(|image| (image.created_at, image.id))
    };
    let exact = newest(true).map(|image| (image, Fit::Exact));
    exact.or_else(|| newest(false).filter(|_| compatible).map(|image| (image, Fit::Compatible)))
}

fn refused(facts: &Facts, now: Timestamp) -> Option<Refusal> {
    let negative = facts.negative.as_ref().filter(|negative| now < negative.until)?;
    Some(Refusal::FailedRecently {
        build: negative.build,
        cause: Box::new(negative.cause.clone()),
        until: negative.until,
    })
}
