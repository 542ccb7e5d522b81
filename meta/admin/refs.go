package admin

import (
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Numbered names a volume by its number.
func Numbered(id meta.VolumeID) *VolumeRef {
	return &VolumeRef{Volume: &VolumeRef_Id{Id: uint32(id)}}
}

// Named names a volume by its name.
func Named(name string) *VolumeRef { return &VolumeRef{Volume: &VolumeRef_Name{Name: name}} }

// roles are those of certificates, in the words of the API.
var roles = map[peer.Role]Role{
	peer.Meta: Role_ROLE_META, peer.ChunkServer: Role_ROLE_CHUNK_SERVER,
	peer.Client: Role_ROLE_CLIENT, peer.Admin: Role_ROLE_ADMIN,
}

// RoleOf says a certificate's role in the words of the API.
func RoleOf(r peer.Role) Role { return roles[r] }

// Peer is the role as certificates name it; "" if they have no such role.
func (x Role) Peer() peer.Role {
	for p, r := range roles { // in any order: each is there once
		if r == x {
			return p
		}
	}
	return ""
}
