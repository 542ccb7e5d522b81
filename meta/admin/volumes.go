package admin

import (
	"context"
	"iter"

	"penstock.io/penstock/meta"
)

// VolumeOf translates a volume from package meta.
func VolumeOf(i meta.VolumeInfo) *Volume {
	x := &Volume{}
	Say(x, i)
	return x
}

// Info translates a volume to package meta.
func (x *Volume) Info() (i meta.VolumeInfo) {
	Hear(&i, x)
	return i
}

// EachVolume lists volumes, page by page; q requests the first page. EachVolume modifies q.
// Errors: as of ListVolumes.
func (c *Client) EachVolume(ctx context.Context, q *ListVolumesRequest) iter.Seq2[meta.VolumeInfo, error] {
	return func(yield func(meta.VolumeInfo, error) bool) {
		for {
			page, err := c.Volumes.ListVolumes(ctx, q)
			if err != nil {
				yield(meta.VolumeInfo{}, err)
				return
			}
			for _, v := range page.Volumes {
				if !yield(v.Info(), nil) {
					return
				}
			}
			if q.PageToken = page.NextPageToken; q.PageToken == "" {
				return
			}
		}
	}
}

// FindVolume finds a volume. Errors: NoSuchVolume.
func (c *Client) FindVolume(ctx context.Context, volume *VolumeRef) (meta.VolumeInfo, error) {
	v, err := c.Volumes.GetVolume(ctx, &GetVolumeRequest{Volume: volume})
	if err != nil {
		return meta.VolumeInfo{}, err
	}
	return v.Info(), nil
}
