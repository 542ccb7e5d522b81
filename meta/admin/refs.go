package admin

import "penstock.io/penstock/meta"

// Numbered names a volume by its number.
func Numbered(id meta.VolumeID) *VolumeRef {
	return &VolumeRef{Volume: &VolumeRef_Id{Id: uint32(id)}}
}

// Named names a volume by its name.
func Named(name string) *VolumeRef { return &VolumeRef{Volume: &VolumeRef_Name{Name: name}} }
