//! The caller of a request.

use std::sync::Arc;

/// Somebody who shares the server with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// What its sandboxes are marked with.
    pub name: String,
    /// Where its snapshots and, on Kubernetes, its workloads are. Tenants may share one.
    pub namespace: String,
}

/// Who calls. Handlers get it as an extractor; it is there exactly on the routes behind the API key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal(Option<Arc<Tenant>>);

impl Principal {
    /// The one user of a server without tenants, to whom everything belongs.
    pub fn operator() -> Self {
        Self(None)
    }

    /// One tenant of several.
    pub fn of_tenant(tenant: Arc<Tenant>) -> Self {
        Self(Some(tenant))
    }

    /// The name for `Spec::tenant` and for whatever else is marked by tenant; `None` on a server without tenants.
    pub fn tenant(&self) -> Option<&str> {
        self.0.as_deref().map(|tenant| tenant.name.as_str())
    }

    /// The namespace for `SnapshotRecord::namespace` and `SnapshotFilter::namespace`.
    pub fn namespace(&self) -> Option<&str> {
        self.0.as_deref().map(|tenant| tenant.namespace.as_str())
    }

    /// A key of the caller's own choosing, such that no two tenants choose the same one.
    pub fn scoped(&self, key: &str) -> String {
        // No tenant's name and no header value has this character.
        self.tenant().map_or_else(|| key.to_owned(), |tenant| format!("{tenant}\u{1f}{key}"))
    }

    /// Whether something marked with `owner` exists for this caller. A tenant sees its own only, so that neither what
    /// was made before there were tenants nor what lacks its mark is shown to the wrong one.
    pub fn may_see(&self, owner: Option<&str>) -> bool {
        self.0.is_none() || self.tenant() == owner
    }

    /// The same for something that belongs to a namespace.
    pub fn may_see_namespace(&self, namespace: Option<&str>) -> bool {
        self.0.is_none() || self.namespace() == namespace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_sees_its_own_and_the_operator_everything() {
        let tenant =
            Principal::of_tenant(Arc::new(Tenant { name: "a".to_owned(), namespace: "ns".to_owned() }));
        assert!(tenant.may_see(Some("a")) && tenant.may_see_namespace(Some("ns")));
        for owner in [None, Some("b"), Some(""), Some("A"), Some("ns")] {
            assert!(!tenant.may_see(owner), "{owner:?}");
            assert!(Principal::operator().may_see(owner), "{owner:?}");
        }
        for namespace in [None, Some("a"), Some("")] {
            assert!(!tenant.may_see_namespace(namespace), "{namespace:?}");
            assert!(Principal::operator().may_see_namespace(namespace), "{namespace:?}");
        }
        assert_eq!((tenant.scoped("k"), Principal::operator().scoped("k")), ("a\u{1f}k".into(), "k".into()));
        assert_eq!((tenant.tenant(), tenant.namespace()), (Some("a"), Some("ns")));
        assert_eq!((Principal::operator().tenant(), Principal::operator().namespace()), (None, None));
    }
}
