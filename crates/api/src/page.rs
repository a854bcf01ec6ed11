//! Pages of lists.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Page size when the caller names none.
pub const DEFAULT_PAGE_SIZE: u64 = 20;
/// Largest page size a caller may ask for.
pub const MAX_PAGE_SIZE: u64 = 200;

/// Where in the whole list a page lies. Clients require all five keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = PaginationInfo)]
pub struct Pagination {
    #[schema(minimum = 1)]
    pub page: u64,
    #[schema(minimum = 1)]
    pub page_size: u64,
    pub total_items: u64,
    pub total_pages: u64,
    pub has_next_page: bool,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    pub items: Vec<T>,
    pub pagination: Pagination,
}

/// Which page the caller wants; both at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRequest {
    pub page: u64,
    pub page_size: u64,
}

impl Default for PageRequest {
    fn default() -> Self {
        Self { page: 1, page_size: DEFAULT_PAGE_SIZE }
    }
}

impl PageRequest {
    /// How many items of the whole list come before this page, and how many belong to it at most.
    pub fn window(self) -> (usize, usize) {
        let skip = self.page.saturating_sub(1).saturating_mul(self.page_size);
        (usize::try_from(skip).unwrap_or(usize::MAX), usize::try_from(self.page_size).unwrap_or(usize::MAX))
    }

    /// What to say about this page when the whole list has `total_items`.
    pub fn describe(self, total_items: usize) -> Pagination {
        let total_items = u64::try_from(total_items).unwrap_or(u64::MAX);
        let total_pages = total_items.div_ceil(self.page_size.max(1));
        Pagination {
            page: self.page,
            page_size: self.page_size,
            total_items,
            total_pages,
            has_next_page: self.page < total_pages,
        }
    }

    /// Cuts the page out of the whole list. A page past the end is empty but carries the real totals.
    pub fn cut<T>(self, whole: Vec<T>) -> Page<T> {
        let pagination = self.describe(whole.len());
        let (skip, take) = self.window();
        Page { items: whole.into_iter().skip(skip).take(take).collect(), pagination }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_past_the_end_is_empty_with_real_totals() {
        let page = PageRequest { page: 9, page_size: 2 }.cut(vec![1, 2, 3]);
        assert!(page.items.is_empty());
        assert_eq!((page.pagination.total_items, page.pagination.total_pages), (3, 2));
        assert!(!page.pagination.has_next_page);
    }

    #[test]
    fn an_empty_list_has_no_pages() {
        let page = PageRequest::default().cut(Vec::<u8>::new());
        assert_eq!(
            serde_json::to_value(page).unwrap(),
            serde_json::json!({"items": [], "pagination":
                {"page": 1, "pageSize": 20, "totalItems": 0, "totalPages": 0, "hasNextPage": false}})
        );
    }

    #[test]
    fn an_absurd_page_number_does_not_overflow() {
        let page = PageRequest { page: u64::MAX, page_size: 200 }.cut(vec![1]);
        assert!(page.items.is_empty());
    }
}
