//! Using, refusing, naming and removing images.

use sandglass_sandbox::{ImageId, Timestamp};
use tracing::warn;

use super::{BuildError, Builds, Driver};
use crate::{
    decide::removal::{self, Insistence, Kept},
    image::{Image, Tag},
    key::TagName,
    ports::Advance,
};

impl Builds {
    /// The image as the store has it.
    ///
    /// # Errors
    /// When there is none, or the store cannot be read.
    pub async fn image(&self, id: ImageId) -> Result<Image, BuildError> {
        self.driver.image(id).await
    }

    /// Holds the image for somebody: it is not removed until they release it. Holding it twice is holding it once.
    ///
    /// # Errors
    /// [`BuildError::Unusable`] when nobody may begin to use it.
    pub async fn acquire(&self, id: ImageId, holder: &str) -> Result<(), BuildError> {
        match self.driver.ports.store.acquire(id, holder, self.driver.now()).await? {
            Advance::Written => Ok(()),
            Advance::Lost => Err(BuildError::Unusable(Box::new(self.driver.image(id).await?))),
        }
    }

    /// The holder does not need the image any more. Not having held it is success.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn release(&self, id: ImageId, holder: &str) -> Result<(), BuildError> {
        self.driver.ports.store.release(id, holder, self.driver.now()).await?;
        // It may have been waited for.
        self.driver.dirt.notify_one();
        Ok(())
    }

    /// Takes every waiter and holder away that is not there any more, as after a restart. Who is about to ask counts as present. Builds that hold images are their own business.
    ///
    /// # Errors
    /// When the store fails; what was taken away is away.
    pub async fn release_absent(&self, present: impl Fn(&str) -> bool + Sync) -> Result<(), BuildError> {
        let runtime = self.driver.ports.engine.name();
        for row in self.driver.ports.store.open_builds(runtime).await? {
            for waiter in row.waiters.iter().filter(|waiter| !present(waiter)) {
                self.leave(row.id, waiter).await?;
            }
        }
        for (image, holder) in self.driver.ports.store.holders(runtime).await? {
            if !holder.starts_with("build:") && !present(&holder) {
                self.release(image, &holder).await?;
            }
        }
        Ok(())
    }

    /// A sandbox could not be made from it. Refused twice, nobody uses it any more. Answers the image as it is then.
    ///
    /// # Errors
    /// When there is no such image, or the store fails.
    pub async fn refused(&self, id: ImageId) -> Result<Image, BuildError> {
        let image = self
            .driver
            .change_image(id, |image| Ok(Some(removal::refused(image, self.driver.rules())?)))
            .await?;
        self.driver.dirt.notify_one();
        Ok(image)
    }

    /// A sandbox was made from it, so earlier refusals were not its fault.
    ///
    /// # Errors
    /// When there is no such image, or the store fails.
    pub async fn served(&self, id: ImageId) -> Result<(), BuildError> {
        let forgiven = |image: &Image| {
            (image.restore_failures > 0 && image.usable())
                .then(|| Image { restore_failures: 0, ..image.clone() })
        };
        self.driver.change_image(id, |image| Ok(forgiven(image))).await.map(drop)
    }

    /// Removes the image; the artifact may go a little later, but is not used meanwhile. Forced while in use, it goes when nobody uses it.
    ///
    /// # Errors
    /// [`BuildError::InUse`] when it is in use and not forced.
    pub async fn delete_image(&self, id: ImageId, insistence: Insistence) -> Result<Image, BuildError> {
        let image = self.driver.change_image(id, |image| removal::remove(image, insistence)).await?;
        self.driver.dirt.notify_one();
        Ok(image)
    }

    /// Moves a name to the image.
    ///
    /// # Errors
    /// When there is no such image of the namespace, or it cannot be used.
    pub async fn move_tag(
        &self,
        namespace: Option<&str>,
        repository_key: &str,
        name: TagName,
        id: ImageId,
    ) -> Result<Image, BuildError> {
        let image = self.image(id).await?;
        if image.lineage.namespace.as_deref() != namespace || image.repository_key != repository_key {
            return Err(BuildError::ImageNotFound);
        }
        let tag = Tag {
            namespace: namespace.map(str::to_owned),
            repository_key: repository_key.to_owned(),
            name,
            image: id,
            moved_at: self.driver.now(),
        };
        match self.driver.ports.store.move_tag(&tag).await? {
            Advance::Written => self.image(id).await,
            Advance::Lost => Err(BuildError::Unusable(Box::new(self.image(id).await?))),
        }
    }

    /// The current instant of the driver's clock.
    pub fn now(&self) -> Timestamp {
        self.driver.now()
    }
}

impl Driver {
    async fn image(&self, id: ImageId) -> Result<Image, BuildError> {
        self.ports.store.image(id).await?.ok_or(BuildError::ImageNotFound)
    }

    /// The image after the decision, or as it is if there is nothing to change.
    pub(super) async fn change_image(
        &self,
        id: ImageId,
        decide: impl Fn(&Image) -> Result<Option<Image>, Kept>,
    ) -> Result<Image, BuildError> {
        loop {
            let image = self.image(id).await?;
            let next = match decide(&image) {
                Ok(Some(next)) => next,
                Ok(None) => return Ok(image),
                Err(Kept::InUse(holders)) => return Err(BuildError::InUse(holders)),
                Err(Kept::Illegal(illegal)) => {
                    warn!(image = %id, %illegal, "an image is not changed");
                    return Err(illegal.into());
                }
            };
            if let Some(written) = self.write_image(&image, next).await? {
                return Ok(written);
            }
        }
    }
}
